"""A reader's pace: what waits for it must become less."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Of what waits at first, the part that its reader takes in each period at least, and the fewest bytes.
_LEAST_SHARE, _LEAST_BYTES = 1 / 8, 64 << 10


class UnsentWatch:
    """Timer of one connection that has unsent bytes. Belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._least = self._left = 0

    def begin(self, seconds: float, waiting: Callable[[], int], give_up: Callable[[], None]) -> None:
        """Call `give_up` once a period of `seconds` has taken too little of the `waiting()` bytes. Begun anew, it
        counts from now on."""
        self.end()
        self._left = waiting()
        self._least = max(_LEAST_BYTES, int(self._left * _LEAST_SHARE))
        self._timer = self._loop.call_later(seconds, self._look, seconds, waiting, give_up)

    def end(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, seconds: float, waiting: Callable[[], int], give_up: Callable[[], None]) -> None:
        left, before = waiting(), self._left
        if before - left < self._least:
            self._timer = None
            give_up()
            return
        self._left = left
        self._timer = self._loop.call_later(seconds, self._look, seconds, waiting, give_up)
