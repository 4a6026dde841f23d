"""Detection of a watermark in token ids: green lists as transformers' WatermarkDetector, SynthID by its mean score."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.generation.core.decoding_mode import SynthIdOptions
from penstock.generation.sampling.ops.green_lists import SELF_HASH, is_green
from penstock.generation.sampling.ops.synthid_numbers import coin_flips, context_hash, g_values

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from penstock.generation.core.decoding_mode import AnyWatermark, WatermarkOptions


class TooFewTokens(ValueError):
    """Error for a text without any token that has its whole context before it."""


@dataclass(frozen=True, slots=True)
class WatermarkEvidence:
    """Result for the tokens of one text."""

    num_tokens_scored: int
    num_green_tokens: int
    green_fraction: float
    # Distance of the number of green tokens from its mean in text without the watermark, in standard deviations.
    z_score: float
    # Probability of at least this number of green tokens without the watermark (one-sided).
    p_value: float
    # True when z_score is above the threshold: the text was written under the watermark.
    prediction: bool
    # Positions in the text of the green tokens, repeated n-grams included, and the first one that is scored.
    green_positions: tuple[int, ...]
    first_scored_position: int


class Detector(Protocol):
    """Detector of one watermark. Any thread may use it."""

    def detect(
        self, token_ids: Seq[int], *, z_threshold: float = 3.0, check: Callable[[], None] | None = None
    ) -> WatermarkEvidence:
        """Score the tokens of one text, its output alone. `check` ends the work by raising. Raises TooFewTokens."""
        ...


def detector_of(
    options: AnyWatermark, vocab_size: int, *, bos_token_id: int | None, ignore_repeated_ngrams: bool
) -> Detector:
    """Return the detector of a watermark; see the two classes."""
    if isinstance(options, SynthIdOptions):
        return SynthIdDetector(options, bos_token_id=bos_token_id)
    return WatermarkDetector(
        options, vocab_size, bos_token_id=bos_token_id, ignore_repeated_ngrams=ignore_repeated_ngrams
    )


class WatermarkDetector:
    """Detects the watermark of the options that a text was generated with.

    `vocab_size` is the model's (its configuration's, which may be more than the tokenizer's). A leading `bos_token_id`
    is not scored. `ignore_repeated_ngrams`: every n-gram counts once. Give the output without its prompt. Any thread
    may use it.
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

    def detect(
        self, token_ids: Seq[int], *, z_threshold: float = 3.0, check: Callable[[], None] | None = None
    ) -> WatermarkEvidence:
        """Score the tokens of one text: half a millisecond for each different n-gram at a vocabulary of 150 000.

        `check` is called before each n-gram, and ends the work by raising. Raises TooFewTokens.
        """
        width = self._options.context_width
        text = list(token_ids)
        num_unscored = int(bool(text) and text[0] == self._bos_token_id)
        del text[:num_unscored]
        if len(text) <= width:
            raise TooFewTokens(f"{len(text)} tokens are too few: the first {width} are only context")
        ngrams = self._ngrams(text)
        is_green: dict[tuple[int, ...], bool] = {}
        for ngram in dict.fromkeys(ngrams):
            if check is not None:
                check()
            is_green[ngram] = self._ends_green(ngram)
        weights = dict.fromkeys(ngrams, 1) if self._ignore_repeated_ngrams else Counter(ngrams)
        scored = sum(weights.values())
        green = sum(weight for ngram, weight in weights.items() if is_green[ngram])
        ratio = self._options.greenlist_ratio
        z_score = (green - ratio * scored) / math.sqrt(scored * ratio * (1.0 - ratio))
        p_value = 0.5 * math.erfc(z_score / math.sqrt(2.0))
        first = num_unscored + len(ngrams[0]) - 1
        return WatermarkEvidence(
            num_tokens_scored=scored,
            num_green_tokens=green,
            green_fraction=green / scored,
            z_score=z_score,
            p_value=p_value,
            prediction=z_score > z_threshold,
            green_positions=tuple(first + place for place, ngram in enumerate(ngrams) if is_green[ngram]),
            first_scored_position=first,
        )

    def _ngrams(self, text: list[int]) -> list[tuple[int, ...]]:
        """Return every token with its context; for selfhash the token itself is the last of its context."""
        size = self._options.context_width + (self._options.seeding_scheme != SELF_HASH)
        return [tuple(text[end - size : end]) for end in range(size, len(text) + 1)]

    def _ends_green(self, ngram: tuple[int, ...]) -> bool:
        context = ngram if self._options.seeding_scheme == SELF_HASH else ngram[:-1]
        return is_green(self._vocab_size, self._options, context, ngram[-1])


class SynthIdDetector:
    """Detects SynthID by the mean of the g values (Dathathri et al. 2024, "mean score").

    Without the watermark each is the flip of a fair coin. A token after a repeated context is not scored, since none is
    marked there. A token counts as green when more than half of its g values are 1.
    """

    def __init__(self, options: SynthIdOptions, *, bos_token_id: int | None = None) -> None:
        """A leading `bos_token_id` is not scored."""
        self._options = options
        self._bos_token_id = bos_token_id

    def detect(
        self, token_ids: Seq[int], *, z_threshold: float = 3.0, check: Callable[[], None] | None = None
    ) -> WatermarkEvidence:
        """Score the tokens of one text, in microseconds each.

        `check` is called before each token, and before each key. Raises TooFewTokens.
        """
        begin = int(bool(token_ids) and token_ids[0] == self._bos_token_id)
        width, size = self._options.ngram_len - 1, self._options.context_history_size
        if len(token_ids) - begin <= width:
            raise TooFewTokens(f"{len(token_ids) - begin} tokens are too few: the first {width} are only context")
        first = begin + width
        # Last place of each context, by its hash; and, by the token's place, contexts that are not recent repetitions.
        last: dict[int, int] = {}
        contexts: dict[int, int] = {}
        for place in range(first, len(token_ids)):
            if check is not None:
                check()
            hashed = context_hash(token_ids[place - width : place])
            if hashed not in last or place - last[hashed] > size:
                contexts[place] = hashed
            last[hashed] = place
        ones = self._count_ones([token_ids[place] for place in contexts], list(contexts.values()), check)
        layers, scored = len(self._options.keys), len(ones)
        fraction = sum(ones) / (layers * scored)
        z_score = (2.0 * fraction - 1.0) * math.sqrt(layers * scored)
        green = tuple(place for place, count in zip(contexts, ones, strict=True) if 2 * count > layers)
        return WatermarkEvidence(
            num_tokens_scored=scored,
            num_green_tokens=len(green),
            green_fraction=fraction,
            z_score=z_score,
            p_value=0.5 * math.erfc(z_score / math.sqrt(2.0)),
            prediction=z_score > z_threshold,
            green_positions=green,
            first_scored_position=first,
        )

    def _count_ones(self, ids: list[int], hashes: list[int], check: Callable[[], None] | None) -> list[int]:
        """Return the number of g values that are 1, for each token after the context of its hash."""
        ids_C, hashes_C = torch.tensor(ids, dtype=torch.int64), torch.tensor(hashes, dtype=torch.int64)
        ones_C = torch.zeros_like(ids_C)
        for g_C in g_values(self._options, coin_flips(self._options), hashes_C, ids_C):
            if check is not None:
                check()
            ones_C += g_C.long()
        return [int(count) for count in ones_C.tolist()]
