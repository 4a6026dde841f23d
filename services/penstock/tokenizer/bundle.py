"""A tokenizer folder as transformers understands it, in a form that needs no transformers to use."""

from __future__ import annotations

from dataclasses import dataclass, field

# transformers stands this (1e30) in for "no limit"; anything as large is none.
LARGE_INTEGER = int(1e20)


@dataclass(frozen=True)
class TokenizerBundle:
    """What transformers' AutoTokenizer made of a folder."""

    # tokenizers' own serialisation of the backend, after transformers has added tokens and set the post-processor.
    backend: str
    # bos_token, eos_token and so on, by transformers' attribute names; what templates can refer to.
    special_tokens: dict[str, str]
    # By name; a folder with one template calls it "default".
    templates: dict[str, str]
    # None when the tokenizer has no limit.
    model_max_length: int | None = None
    padding_side: str = "right"
    truncation_side: str = "right"
    pad_token_type_id: int = 0
    clean_up_tokenization_spaces: bool = False
    split_special_tokens: bool = False
    # Ids below this are decoded; the rows that a model's embedding is padded with decode to nothing.
    id_limit: int = 0
    # Of generation_config.json, in its order.
    generation_eos_token_ids: list[int] = field(default_factory=list)
