"""Gathering of tokens for fewer messages while the event loop is behind."""

from __future__ import annotations

import asyncio
import time

from penstock.router.aio import Wakeup

# Seconds between looks at the loop's delay, and the share that a look has in the mean: it follows within 50 ms.
_LOOK_SECONDS, _LOOK_SHARE = 0.01, 0.2
# What comes to the loop waits for half of a turn and its place in the next one: as many turns, on average.
_TURNS = 1.5
# Where the mean is more, a message waits for a multiple of it, and for so long at least that another token may come:
# the more calls wait for the loop, the less of it goes to messages.
_BUSY_SECONDS, _GAIN, _LEAST_HOLD_SECONDS = 0.0005, 25.0, 0.03


class DeltaPace:
    """Decides when the streams' handlers wake up for new tokens. Belongs to one event loop.

    A message costs the loop as much as ten tokens. At once while the loop is in time; else for all at a time after a
    moment that grows with the loop's delay, so that tokens which come meanwhile share a message, and what else waits
    for the loop (a new call, its refusal) is sooner done. The delay is told by the length of a turn, measured from time
    to time while tokens come.
    """

    def __init__(self, most_seconds: float) -> None:
        """Make it. Nothing waits longer than `most_seconds`; 0: nothing ever waits."""
        self._most = most_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._delay = 0.0
        self._is_looking = self._is_used = False
        self._held: list[Wakeup] = []
        # Seconds that a message waits now; 0: none does.
        self.hold_seconds = 0.0

    def wake(self, wakeup: Wakeup) -> None:
        """Set `wakeup`, at once or with others later. The per-token path."""
        self._is_used = True
        if not self._is_looking:
            self._look_later()
        if not self.hold_seconds:
            wakeup.set()
            return
        if not self._held:
            asyncio.get_running_loop().call_later(self.hold_seconds, self._wake_all)
        self._held.append(wakeup)

    def _wake_all(self) -> None:
        held, self._held = self._held, []
        for wakeup in held:
            wakeup.set()

    def _look_later(self) -> None:
        if self._most:
            loop = self._loop = self._loop or asyncio.get_running_loop()
            self._is_looking, self._is_used = True, False
            loop.call_later(_LOOK_SECONDS, self._look)

    def _hold(self) -> float:
        return min(max(_GAIN * self._delay, _LEAST_HOLD_SECONDS), self._most)

    def _look(self) -> None:
        assert self._loop is not None
        # To the second callback from here it is one turn, whether timers come behind what sockets have brought, as with
        # asyncio's loop, or before it, as with uvloop's. How late the timer is tells less with the one than the other.
        self._loop.call_soon(self._loop.call_soon, self._note_turn, time.monotonic())

    def _note_turn(self, began: float) -> None:
        self._delay += _LOOK_SHARE * (_TURNS * (time.monotonic() - began) - self._delay)
        self.hold_seconds = self._hold() if self._delay > _BUSY_SECONDS else 0.0
        self._is_looking = False
        if self._is_used:
            self._look_later()
        else:
            self._delay = self.hold_seconds = 0.0
