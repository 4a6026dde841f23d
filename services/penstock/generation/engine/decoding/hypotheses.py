"""Best ended sequences of a beam search: they are returned at the end, and decide whether the search goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.generation.core.decoding_mode import EarlyStopping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.generation.core.request import PositionLogprobs
    from penstock.generation.core.tensors import StepTensors
    from penstock.generation.engine.decoding.beam_options import BeamOptions
    from penstock.generation.engine.stopping import Stop


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An ended sequence: output tokens only, with the token that ended it."""

    token_ids: tuple[int, ...]
    # Sum of the processed scores of its tokens, divided by length ** length_penalty.
    score: float
    stop: Stop
    # One entry per token, or none at all.
    logprobs: tuple[PositionLogprobs, ...] = ()
    tensors: tuple[StepTensors | None, ...] = ()


def length_normalised(score: float, length: int, penalty: float) -> float:
    """Return score / length ** penalty, even if the power is beyond a float."""
    try:
        divisor = math.pow(length, penalty)
    except OverflowError:
        divisor = math.inf
    if divisor == 0.0:
        return math.copysign(math.inf, score) if score else 0.0
    return score / divisor


class Hypotheses:
    """At most `size` ended sequences, best first; of equal scores the earlier one.

    transformers 4.41 calls this BeamHypotheses; 5.23 keeps it in the tensors `sequences` and `beam_scores`.
    """

    def __init__(self, size: int, options: BeamOptions, max_length: int) -> None:
        """`max_length`: most output tokens of a sequence."""
        self._size = size
        self._options = options
        self._max_length = max_length
        self._best: list[Hypothesis] = []

    def __len__(self) -> int:
        return len(self._best)

    def __iter__(self) -> Iterator[Hypothesis]:
        return iter(self._best)

    def add(
        self,
        token_ids: tuple[int, ...],
        total: float,
        stop: Stop,
        logprobs: tuple[PositionLogprobs, ...] = (),
        tensors: tuple[StepTensors | None, ...] = (),
    ) -> None:
        """Add a sequence with the sum of its scores, `total`; the worst one is dropped."""
        score = length_normalised(total, max(len(token_ids), 1), self._options.length_penalty)
        self._best.append(Hypothesis(token_ids, score, stop, logprobs, tensors))
        self._best.sort(key=lambda one: one.score, reverse=True)
        del self._best[self._size :]

    def is_decided(self, best_total: float, length: int) -> bool:
        """True when a search may end. Its best open sequence has `length` tokens and scores `best_total`.

        `early_stopping` decides as in transformers. TRUE: once the list is full. FALSE: when the open sequence, at its
        length, is no better than the worst one. NEVER: when it could not become better up to the greatest length.
        """
        if len(self._best) < self._size:
            return False
        if self._options.early_stopping is EarlyStopping.TRUE:
            return True
        penalty = self._options.length_penalty
        if self._options.early_stopping is EarlyStopping.NEVER and penalty > 0.0:
            length = self._max_length
        return length_normalised(best_total, length, penalty) <= self._best[-1].score
