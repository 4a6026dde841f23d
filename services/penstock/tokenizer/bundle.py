"""Facts about a tokenizer folder as transformers reads it, in a form that can be used without transformers."""

from __future__ import annotations

from dataclasses import dataclass, field

# transformers uses 1e30 for "no limit"; any limit above the longest context on the wire is none.
LARGE_INTEGER = 2**31


@dataclass(frozen=True)
class TokenizerBundle:
    """Result of transformers' AutoTokenizer for a folder."""

    # tokenizers' own serialisation of the backend, after transformers has added tokens and set the post-processor.
    backend: str
    # bos_token, eos_token and so on, by transformers' attribute names, for templates.
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
    # Ids below this are decoded; ids of the embedding's padding rows decode to nothing.
    id_limit: int = 0
    # End-of-sequence ids of generation_config.json, in its order.
    generation_eos_token_ids: list[int] = field(default_factory=list)


# Ids of token types fit in the rows of any embedding.
_MOST_TYPE_ID = 2**31 - 1
_SIDES = ("left", "right")


def checked(bundle: TokenizerBundle) -> TokenizerBundle:
    """Make the bundle from a folder's facts of any types. Raises TypeError naming a wrong one."""
    for name in ("special_tokens", "templates"):
        if not all(isinstance(one, str) for pair in getattr(bundle, name).items() for one in pair):
            raise TypeError(f"tokenizer_config.json has {name} that are not texts")
    for name in ("padding_side", "truncation_side"):
        if getattr(bundle, name) not in _SIDES:
            raise TypeError(f"tokenizer_config.json has a {name} other than left and right")
    if type(bundle.pad_token_type_id) is not int or not 0 <= bundle.pad_token_type_id <= _MOST_TYPE_ID:
        raise TypeError("tokenizer_config.json has a pad_token_type_id that is not an id")
    return bundle
