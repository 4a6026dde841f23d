"""Connections of the gateway, and who gives way where there are too many: strangers, then those that rest."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from penstock.common.heap import HeapTrimmer
from penstock.http2.strangers import Stranger, Strangers

# Connections that have gone are a flood, and the seconds until the heap is trimmed behind it.
_FLOOD, _TRIM_SECONDS = 256, 3.0


class Turns:
    """Turns of work that all strangers ask for together: those beyond their share wait, the first to come first."""

    def __init__(self, share: float, seconds: float, saved_seconds: float) -> None:
        """Make it. A turn is work of `seconds`; together they get `share` of a processor, and what was saved up."""
        self._every, self._saved = seconds / share, saved_seconds / share
        self._next_at = 0.0

    def is_free(self) -> bool:
        """True when a turn would come at once."""
        return self._next_at <= time.monotonic()

    def delay(self) -> float:
        """Take a turn; return the seconds until it comes, 0 for at once."""
        now = time.monotonic()
        self._next_at = max(self._next_at, now - self._saved) + self._every
        return max(0.0, self._next_at - now)

    def give_back(self) -> None:
        """Leave a turn to those behind: whoever had it is gone."""
        self._next_at -= self._every


class OneATurn:
    """Callbacks, one of which is called in each turn of the event loop: whoever else there is waits for one only."""

    def __init__(self) -> None:
        self._first: deque[Callable[[], None]] = deque()
        self._others: deque[Callable[[], None]] = deque()
        self._is_taken = False

    def call(self, callback: Callable[[], None], goes_first: bool) -> None:
        """Call it at once, else in a later turn: before the others where it goes first."""
        if self._is_taken:
            (self._first if goes_first else self._others).append(callback)
            return
        self._begin_turn(callback)

    def _begin_turn(self, callback: Callable[[], None]) -> None:
        self._is_taken = True
        asyncio.get_running_loop().call_soon(self._next)
        callback()

    def _next(self) -> None:
        self._is_taken = False
        if waiting := self._first or self._others:
            self._begin_turn(waiting.popleft())


class Connections:
    """All connections of a gateway. Belongs to one event loop.

    A new connection always finds a place while one of the others has no request at work: the oldest stranger goes, else
    the one that has rested the longest, else the one that has been sending the longest. So neither silent connections
    nor half-sent requests shut anybody out.
    """

    def __init__(
        self, most: int, strangers: Strangers, answers: Turns, firsts: Turns, on_evicted: Callable[[], None]
    ) -> None:
        """Make it for at most `most` connections, of which `strangers` have no admitted request yet.

        `answers`: turns of answering those; `firsts`: of the first request of a connection, where it goes first.
        `on_evicted` is called when another than a stranger has made room.
        """
        self.strangers, self.answers, self.firsts = strangers, answers, firsts
        # An answer takes a millisecond, mostly; many in one turn of the loop are a gap for all others.
        self.starts = OneATurn()
        self._most = most
        self._all: set[Stranger] = set()
        # Admitted ones without a request, from the one that has rested the longest; those that are sending one.
        self._resting: dict[Stranger, None] = {}
        self._sending: dict[Stranger, None] = {}
        self._on_evicted = on_evicted
        # No more are taken.
        self.is_closed = False
        self._heap = HeapTrimmer(_FLOOD, _TRIM_SECONDS)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Stranger) -> bool:
        """Add a new connection, as a stranger; another may have to go. False: all have requests at work."""
        if self.is_closed or (len(self._all) >= self._most and not self._make_room()):
            return False
        self._all.add(connection)
        self.strangers.add(connection)
        return True

    def discard(self, connection: Stranger) -> None:
        """Forget one that is lost."""
        if connection in self._all:
            self._all.remove(connection)
            self._heap.note()
        self._resting.pop(connection, None)
        self._sending.pop(connection, None)
        self.strangers.discard(connection)

    def admit(self, connection: Stranger) -> None:
        """Note that a request was admitted: its connection is no stranger, and sends until the request is at work."""
        self.strangers.discard(connection)
        self._resting.pop(connection, None)
        if connection in self._all:
            self._sending[connection] = None

    def begin_work(self, connection: Stranger) -> None:
        """Note that a request of an admitted connection is at work: it does not give way any more."""
        self._sending.pop(connection, None)

    def end_work(self, connection: Stranger) -> None:
        """Note that an admitted connection rests again."""
        self._sending.pop(connection, None)
        if connection in self._all:
            self._resting[connection] = None

    def _make_room(self) -> bool:
        oldest = self.strangers.evict_oldest()
        if oldest is None:
            oldest = next(iter(self._resting), None) or next(iter(self._sending), None)
            if oldest is None:
                return False
            self._on_evicted()
            oldest.evict()
        # At once: it may take a turn to go, and the next one must not find it here again.
        self.discard(oldest)
        return True
