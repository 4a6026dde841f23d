"""Ratios of paired turns, how far they spread, and a cell's verdict: times of the tree over times of the base."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Share of the cases in which the median's interval must contain what more pairs would come to; with five pairs, the
# smallest and the largest contain it in 15 of 16.
COVERAGE = 0.93


def ratios(new: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratios of the turns of one round, pair by pair. Raises ValueError for unequal numbers of turns, none,
    or no time."""
    if len(new) != len(base) or not new:
        raise ValueError(f"{len(new)} turns of the tree, {len(base)} of the base")
    if min(*new, *base) <= 0:
        raise ValueError("a turn took no time")
    return [ours / theirs for ours, theirs in zip(new, base, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Two of the values between which the median of many more lies with `COVERAGE`: the ends for up to eight of them.

    By their order alone (the sign test), so that nothing is assumed of how they are distributed.
    """
    ordered = sorted(values)
    skipped = 0
    tail = 1.0
    for count in range(1, len(ordered) // 2):
        tail += math.comb(len(ordered), count)
        if 2 * tail / 2 ** len(ordered) > 1 - COVERAGE:
            break
        skipped = count
    return ordered[skipped], ordered[-1 - skipped]


@dataclass
class Cell:
    """One figure's ratios, a list for each round."""

    name: str
    rounds: list[list[float]]

    @property
    def pairs(self) -> list[float]:
        """Ratios of all rounds."""
        return [one for found in self.rounds for one in found]

    @property
    def median(self) -> float:
        """Above 1: the tree is slower."""
        return statistics.median(self.pairs)

    @property
    def noise(self) -> float:
        """Possible error of the median: the distance to the further end of its interval; infinite for one pair."""
        if len(self.pairs) < 2:
            return math.inf
        low, high = interval(self.pairs)
        return max(self.median - low, high - self.median)

    def is_slower(self, bound: float) -> bool:
        """True when the median is beyond the bound (0.02: two per cent)."""
        return self.median > 1 + bound

    def is_noisy(self, bound: float) -> bool:
        """True when the pairs are too far apart to tell."""
        return self.noise > bound

    def verdict(self, bound: float) -> str:
        """A word for the table, with `noisy` beside it."""
        word = "slower" if self.is_slower(bound) else "faster" if self.median < 1 - bound else "ok"
        if not self.is_noisy(bound):
            return word
        return "noisy" if word == "ok" else f"{word}, noisy"

    def facts(self, bound: float) -> dict[str, Any]:
        """Return the facts of the cell for JSON."""
        return {
            "cell": self.name,
            "ratio": self.median,
            "min": min(self.pairs),
            "max": max(self.pairs),
            # None, as JSON has no infinity.
            "noise": self.noise if math.isfinite(self.noise) else None,
            "verdict": self.verdict(bound),
            "rounds": self.rounds,
        }
