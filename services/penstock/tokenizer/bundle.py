"""Facts of a tokenizer folder as transformers reads it, in a form that needs no transformers to use."""

from __future__ import annotations

from dataclasses import dataclass, field

# transformers' value (1e30) for "no limit"; any limit as large is none.
LARGE_INTEGER = int(1e20)


@dataclass(frozen=True)
class TokenizerBundle:
    """Result of transformers' AutoTokenizer for a folder."""

    # tokenizers' own serialisation of the backend, after transformers has added tokens and set the post-processor.
    backend: str
    # bos_token, eos_token and so on, by transformers' attribute names, which templates can use.
    special_tokens: dict[str, str]
    # Template texts by name; a folder's only template is "default".
    templates: dict[str, str]
    # response_template of tokenizer_config.json as JSON text; empty when there is none.
    response_template: str = ""
    # None when the tokenizer has no limit.
    model_max_length: int | None = None
    padding_side: str = "right"
    truncation_side: str = "right"
    pad_token_type_id: int = 0
    clean_up_tokenization_spaces: bool = False
    split_special_tokens: bool = False
    # Ids below this are decoded; those of the embedding's padding rows decode to nothing.
    id_limit: int = 0
    # End-of-sequence ids of generation_config.json, in its order.
    generation_eos_token_ids: list[int] = field(default_factory=list)
