"""Choice between the two ways of a preemption, by their measured costs.

A preempted group's blocks are copied to the host pool and back (swap), or discarded and computed again (recompute).
Rows of a prompt join steps that run anyway, so the cost of a token is the time that a further row adds to a step; a
copy takes time of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.generation.engine.config import AUTO, SWAP

if TYPE_CHECKING:
    from penstock.generation.engine.group import SequenceGroup

# Weight of the past at each further step and copy.
_STEPS_KEPT, _COPIES_KEPT = 0.995, 0.9
# Sizes that differ by less than this share of their mean do not determine a slope.
_LEAST_SPREAD = 0.1
# A row costs at least this share of a step's time per row: noise must not make it free.
_LEAST_SHARE = 0.02
# The assumed cost of swapping falls by this factor at every choice of recompute, so that swapping is tried again.
_FADING = 0.98
# Bytes a second of copies before any measurement: few, since a step that copies must not seem to hang.
_FIRST_GUESS = 0.5e9


class LineFit:
    """Line through (size, seconds), by least squares over fading observations."""

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._slope: float | None = None

    @property
    def is_known(self) -> bool:
        """True once anything was observed."""
        return self._n > 0.0

    def add(self, size: float, seconds: float) -> None:
        """Take an observation."""
        kept = self._kept
        self._n = self._n * kept + 1.0
        self._x = self._x * kept + size
        self._y = self._y * kept + seconds
        self._xx = self._xx * kept + size * size
        self._xy = self._xy * kept + size * seconds

    @property
    def slope(self) -> float:
        """Seconds per unit of size. While all sizes are alike: the last known slope, or else the mean time per unit."""
        if not self._x:
            return 0.0
        mean = self._y / self._x
        spread = self._n * self._xx - self._x * self._x
        if spread > (_LEAST_SPREAD * self._x) ** 2:
            self._slope = (self._n * self._xy - self._x * self._y) / spread
        return mean if self._slope is None else min(max(self._slope, _LEAST_SHARE * mean), mean)

    def seconds(self, size: float) -> float:
        """Seconds that `size` takes, with the fixed part."""
        if not size or not self._n:
            return 0.0
        slope = self.slope
        return max(self._y / self._n - slope * self._x / self._n, 0.0) + slope * size


class SwapPolicy:
    """Policy of preemptions with a host pool. Engine thread only."""

    def __init__(self, way: str, block_bytes: int) -> None:
        """`way` is one of PREEMPTIONS. `block_bytes` 0: not known."""
        self._way = way
        self._block_bytes = block_bytes
        self._rows = LineFit(_STEPS_KEPT)
        self._out, self._in = LineFit(_COPIES_KEPT), LineFit(_COPIES_KEPT)
        # Trust in the measured times of copies.
        self._trust = 1.0

    def swaps(self, group: SequenceGroup, blocks: int, tokens: int) -> bool:
        """True when `group` should be swapped: `blocks` to copy, and back, against `tokens` to compute again."""
        if self._way != AUTO:
            return self._way == SWAP
        if not self._out.is_known or not self._rows.is_known:
            return True
        back = self._in if self._in.is_known else self._out
        cost = self._trust * (self._out.seconds(blocks) + back.seconds(blocks))
        if cost <= tokens * self._rows.slope:
            return True
        self._trust *= _FADING
        return False

    def stepped(self, rows: int, seconds: float) -> None:
        """Take the time of a step's forward pass, without copies."""
        self._rows.add(rows, seconds)

    def copied(self, num_out: int, out_seconds: float, num_in: int, in_seconds: float) -> None:
        """Take the time of a step's copies to the host and from it."""
        self._trust = 1.0
        if num_out:
            self._out.add(num_out, out_seconds)
        if num_in:
            self._in.add(num_in, in_seconds)

    def copy_seconds(self, num_out: int, num_in: int) -> float:
        """Expected seconds of copies."""
        guess = self._block_bytes / _FIRST_GUESS
        return sum(
            fit.seconds(count) if fit.is_known else count * guess
            for fit, count in ((self._out, num_out), (self._in, num_in))
        )
