"""Ages of the requests that run, in sums: whether their ends are spread evenly, or they began together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.generation.engine.expected_time import ExpectedTime


class RunningAges:
    """Begins and expected steps of running requests. O(1) for each that begins or ends. Engine thread only."""

    def __init__(self) -> None:
        self._num = 0
        self._begins = self._steps = 0.0

    def began(self, expected: ExpectedTime, at: float) -> None:
        """Take one that has its first step at a time."""
        self._num += 1
        self._begins += at
        self._steps += expected.prompt_steps + expected.output_steps

    def ended(self, expected: ExpectedTime, at: float) -> None:
        """Take the end of one that began at a time."""
        self._num -= 1
        if self._num:
            self._begins -= at
            self._steps -= expected.prompt_steps + expected.output_steps
        else:
            # Of sums of fractions something may be left over.
            self._begins = self._steps = 0.0

    def uneven_seconds(self, now: float, step_seconds: float) -> float:
        """Seconds by which their mean end is later than that of requests which began one after the other.

        Those have half of their time behind them, and a place becomes free all the time. A crowd that came at once has
        all of it before it: nobody's place becomes free until then.
        """
        if not self._num:
            return 0.0
        half = self._steps / self._num * step_seconds / 2
        return max(half - (now - self._begins / self._num), 0.0)
