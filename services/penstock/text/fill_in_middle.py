"""Prompts that ask for the text between two others, for models trained with fill-in-the-middle tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.common.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """Tokens of one family: they stand before the two texts, and before the answer if there is one for it."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the existing ones."""
        return tuple(filter(None, (self.prefix, self.suffix, self.middle)))

    def arranged(
        self, ids: Mapping[str, int], begin: Sequence[int], prefix: Sequence[int], suffix: Sequence[int]
    ) -> list[int]:
        """Return the prompt's ids. `begin`: ids that the tokenizer puts before any text."""
        before, after = [ids[self.prefix], *prefix], [ids[self.suffix], *suffix]
        parts = [*after, *before] if self.suffix_first else [*before, *after]
        return [*begin, *parts, *([ids[self.middle]] if self.middle else [])]


# Qwen2.5-Coder and CodeGemma; StarCoder and Granite; SantaCoder; DeepSeek; GLM; Code Llama; Seed-Coder; Codestral.
FORMS = (
    FillInMiddle("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    FillInMiddle("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    FillInMiddle("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    FillInMiddle("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    FillInMiddle("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    FillInMiddle("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    FillInMiddle("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    FillInMiddle("[PREFIX]", "[SUFFIX]", suffix_first=True),
)
TOKENS = tuple(dict.fromkeys(token for form in FORMS for token in form.tokens))


def form_of(ids: Mapping[str, int]) -> FillInMiddle:
    """Return the form with tokens that a tokenizer has. Raises InvalidArgument naming `suffix` if it has no form's."""
    for form in FORMS:
        # One id for several of them means an unknown token.
        if len({ids[token] for token in form.tokens if token in ids}) == len(form.tokens):
            return form
    raise InvalidArgument(
        "suffix", "is not supported by this model: its tokenizer has no tokens for filling in the middle"
    )
