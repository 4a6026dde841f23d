"""Pace of a batch's lines beside callers.

A line rests in the engine while others are there, but what brings it there and back takes processor time of every
service. Where lines are short that fills the machine, and many of them begin and end in the same step: a caller's
request then waits in each service.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StartPace:
    """Pace at which lines may start: `per_second`, evenly, while callers are there and for `quiet_seconds` after them.

    Otherwise any number. Belongs to one event loop.
    """

    def __init__(self, per_second: float, quiet_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`per_second` 0: any number, always."""
        self._interval = 1.0 / per_second if per_second else 0.0
        self._quiet_seconds = quiet_seconds
        self._clock = clock
        self._callers = 0
        self._left_at = self._next_start = -math.inf

    @contextmanager
    def caller(self) -> Iterator[None]:
        """Note a caller that is there during the block."""
        self._callers += 1
        try:
            yield
        finally:
            self._callers -= 1
            self._left_at = self._clock()

    def wait_seconds(self) -> float:
        """Seconds until the next line may start; 0: it may now."""
        # Without callers the pace may end before its next turn.
        return max(min(self._next_start, self._quiet_at()) - self._clock(), 0.0)

    def room(self, most: int) -> int:
        """Return the number of lines that may start now, at most `most`, and count on it that they do."""
        now = self._clock()
        if now >= self._quiet_at() or not self._interval:
            return most
        if most <= 0 or now < self._next_start:
            return 0
        self._next_start = now + self._interval
        return 1

    def _quiet_at(self) -> float:
        """Time from which any number may start; none is known while callers are there."""
        return math.inf if self._callers else self._left_at + self._quiet_seconds
