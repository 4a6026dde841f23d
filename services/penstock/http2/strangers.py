"""Connections that have shown no credentials yet: how many there are, and how much work they may ask for together."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

# Seconds of work that one stranger is given in a turn of the event loop, however much it has sent.
SLICE_SECONDS = 0.0005
# Seconds of work that strangers may have saved up by being quiet.
_SAVED_SECONDS = 0.05
# Share of a stranger's past work that still counts against it after a second.
_REMEMBERED = 0.5


class Stranger(Protocol):
    """A connection as this module sees it."""

    # Seconds of work that it has asked for, older ones counted less, and the time of that figure.
    work: float
    worked_at: float

    @property
    def is_busy(self) -> bool:
        """True while it has calls."""

    def evict(self) -> None:
        """Hang up: others need the place."""

    def go_on(self) -> None:
        """Look at the bytes that wait."""


class Strangers:
    """Strangers of a server. Belongs to one event loop.

    While they ask for less than their share nobody waits. Beyond it those wait that asked for more than the others do,
    one after the other, so a probe among floods is answered at once.
    """

    def __init__(self, most: int, share: float) -> None:
        """Make it for at most `most` connections, which together get `share` of a processor."""
        self._most = most
        self._share = share
        self._all: dict[Stranger, None] = {}
        # Seconds of work left; refilled by `share` a second.
        self._left = _SAVED_SECONDS
        self._filled_at = time.monotonic()
        self._waiting: deque[Stranger] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._all)

    @property
    def are_many(self) -> bool:
        """True while they ask for more than their share."""
        self._fill()
        return self._left <= 0

    def add(self, stranger: Stranger) -> None:
        """Add a new connection. Where there are too many one goes: the oldest without calls, else the oldest."""
        if len(self._all) >= self._most:
            oldest = next((one for one in self._all if not one.is_busy), next(iter(self._all)))
            # At once: it may take a while to go, and the next one must not find it here again.
            del self._all[oldest]
            oldest.evict()
        self._all[stranger] = None

    def discard(self, stranger: Stranger) -> None:
        """Forget a connection that has shown credentials, or is lost."""
        self._all.pop(stranger, None)

    def spend(self, stranger: Stranger, seconds: float) -> None:
        """Count work that was done for `stranger`."""
        now = self._fill()
        self._left -= seconds
        stranger.work = self._work_of(stranger, now) + seconds
        stranger.worked_at = now

    def may_go_on(self, stranger: Stranger) -> bool:
        """True when bytes of `stranger` may be looked at now; where not, its `go_on` is called once they may."""
        now = self._fill()
        # An equal part of what all get within the time that work is remembered.
        if self._left > 0 or self._work_of(stranger, now) <= self._share / max(1, len(self._all)):
            return True
        self._waiting.append(stranger)
        self._arm()
        return False

    def _arm(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, -self._left / self._share), self._next)

    def _next(self) -> None:
        self._timer = None
        self._fill()
        # One at a time: the work of each delays the turn of the next.
        self._waiting.popleft().go_on()
        self._arm()

    def _fill(self) -> float:
        now = time.monotonic()
        self._left = min(_SAVED_SECONDS, self._left + (now - self._filled_at) * self._share)
        self._filled_at = now
        return now

    def _work_of(self, stranger: Stranger, now: float) -> float:
        return float(stranger.work * _REMEMBERED ** (now - stranger.worked_at))
