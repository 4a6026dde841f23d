"""Connections of the gateway. When there are too many, strangers give way first, then idle connections."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from penstock.common.heap import HeapTrimmer
from penstock.http2.handshake_pace import HandshakePace
from penstock.http2.strangers import Stranger, Strangers

# Number of lost connections that counts as a flood, and the seconds until the heap is trimmed after it.
_FLOOD, _TRIM_SECONDS = 256, 3.0


class Turns:
    """Turns of work for all strangers together: requests beyond their share wait, first come first served."""

    def __init__(self, share: float, seconds: float, saved_seconds: float) -> None:
        """Make it. A turn is work of `seconds`; together they get `share` of a processor, and the saved-up time."""
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
        """Give a turn to those behind: its owner is gone."""
        self._next_at -= self._every


class OneATurn:
    """Callbacks; each turn of the event loop calls one, so other work waits for only one of them."""

    def __init__(self) -> None:
        self._first: deque[Callable[[], None]] = deque()
        self._others: deque[Callable[[], None]] = deque()
        self._is_taken = False

    def call(self, callback: Callable[[], None], goes_first: bool) -> None:
        """Call it at once, else in a later turn; before the others if it goes first."""
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

    A new connection always finds a place while one of the others has no request in progress: the oldest stranger goes,
    else the one that has been idle the longest, else the one that has been sending the longest. So neither silent
    connections nor half-sent requests shut anybody out.
    """

    def __init__(
        self,
        most: int,
        strangers: Strangers,
        answers: Turns,
        firsts: Turns,
        handshakes: HandshakePace,
        on_evicted: Callable[[], None],
    ) -> None:
        """Make it for at most `most` connections, and at most `strangers` without an admitted request yet.

        `answers`: turns for answering these; `firsts`: turns for a connection's first request that goes first;
        `handshakes`: their pace, for TLS. `on_evicted` is called when a connection other than a stranger has made room.
        """
        self.strangers, self.answers, self.firsts, self.handshakes = strangers, answers, firsts, handshakes
        # An answer mostly takes a millisecond; many in one turn of the loop would be a gap for all others.
        self.starts = OneATurn()
        self._most = most
        self._all: set[Stranger] = set()
        # Admitted connections without a request, the longest idle first; and those that are sending one.
        self._resting: dict[Stranger, None] = {}
        self._sending: dict[Stranger, None] = {}
        self._on_evicted = on_evicted
        # True: no more are accepted.
        self.is_closed = False
        self._heap = HeapTrimmer(_FLOOD, _TRIM_SECONDS)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Stranger) -> bool:
        """Add a new connection as a stranger; another may have to go. False: all have requests in progress."""
        if self.is_closed or (len(self._all) >= self._most and not self._make_room()):
            return False
        self._all.add(connection)
        self.strangers.add(connection)
        return True

    def discard(self, connection: Stranger) -> None:
        """Forget a lost connection."""
        if connection in self._all:
            self._all.remove(connection)
            self._heap.note()
        self._resting.pop(connection, None)
        self._sending.pop(connection, None)
        self.strangers.discard(connection)

    def admit(self, connection: Stranger) -> None:
        """Note that a request was admitted: its connection is no stranger, and is sending until the request starts."""
        self.strangers.discard(connection)
        self._resting.pop(connection, None)
        if connection in self._all:
            self._sending[connection] = None

    def begin_work(self, connection: Stranger) -> None:
        """Note that a request of an admitted connection is in progress: the connection does not give way."""
        self._sending.pop(connection, None)

    def end_work(self, connection: Stranger) -> None:
        """Note that an admitted connection is idle again."""
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
        # At once: its end may take a turn of the loop, and the next new connection must not find it again.
        self.discard(oldest)
        return True
