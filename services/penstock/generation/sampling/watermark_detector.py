"""Was a text written under the watermark? transformers' WatermarkDetector, for token ids."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.generation.sampling.ops.green_lists import SELF_HASH, is_green

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.modes import WatermarkOptions


@dataclass(frozen=True, slots=True)
class WatermarkEvidence:
    """What the tokens of one text say."""

    num_tokens_scored: int
    num_green_tokens: int
    green_fraction: float
    # Standard deviations between the number of green tokens and what text without the watermark has on average.
    z_score: float
    # Probability of so many green tokens without the watermark (one-sided).
    p_value: float
    # z_score above the threshold: written under the watermark.
    prediction: bool

    @property
    def confidence(self) -> float:
        """1 - p_value."""
        return 1.0 - self.p_value


class WatermarkDetector:
    """Detects the watermark of the options that a text was generated with.

    `vocab_size` is the model's (its configuration's, which may be more than the tokenizer's). A leading `bos_token_id`
    is not scored. `ignore_repeated_ngrams`: every n-gram counts once. Give the output without its prompt.
    """

    def __init__(
        self,
        options: WatermarkOptions,
        vocab_size: int,
        *,
        bos_token_id: int | None = None,
        ignore_repeated_ngrams: bool = False,
    ) -> None:
        self._options = options
        self._vocab_size = vocab_size
        self._bos_token_id = bos_token_id
        self._ignore_repeated_ngrams = ignore_repeated_ngrams

    def detect(self, token_ids: Seq[int], *, z_threshold: float = 3.0) -> WatermarkEvidence:
        """Score the tokens of one text. Raises ValueError when there are too few to score one."""
        width = self._options.context_width
        text = list(token_ids)
        if text and text[0] == self._bos_token_id:
            del text[0]
        if len(text) <= width:
            raise ValueError(f"{len(text)} tokens are too few: the first {width} are only context")
        ngrams = Counter(self._ngrams(text))
        weights = dict.fromkeys(ngrams, 1) if self._ignore_repeated_ngrams else ngrams
        scored = sum(weights.values())
        green = sum(weight for ngram, weight in weights.items() if self._ends_green(ngram))
        ratio = self._options.greenlist_ratio
        z_score = (green - ratio * scored) / math.sqrt(scored * ratio * (1.0 - ratio))
        p_value = 0.5 * math.erfc(z_score / math.sqrt(2.0))
        return WatermarkEvidence(scored, green, green / scored, z_score, p_value, z_score > z_threshold)

    def _ngrams(self, text: list[int]) -> list[tuple[int, ...]]:
        """Every token with its context; for selfhash it is itself the last of its context."""
        size = self._options.context_width + (self._options.seeding_scheme != SELF_HASH)
        return [tuple(text[end - size : end]) for end in range(size, len(text) + 1)]

    def _ends_green(self, ngram: tuple[int, ...]) -> bool:
        context = ngram if self._options.seeding_scheme == SELF_HASH else ngram[:-1]
        return is_green(self._vocab_size, self._options, context, ngram[-1])
