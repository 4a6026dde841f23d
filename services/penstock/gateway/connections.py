"""Connections of the gateway, and who gives way where there are too many: strangers, then those that rest."""

from __future__ import annotations

from penstock.http2.strangers import Stranger, Strangers


class Connections:
    """All connections of a gateway. Belongs to one event loop.

    A new connection always finds a place while one of the others has no request at work: the one that has rested the
    longest goes. So neither silent connections nor half-sent requests shut anybody out.
    """

    def __init__(self, most: int, strangers: Strangers) -> None:
        """Make it for at most `most` connections, of which `strangers` have no admitted request yet."""
        self.strangers = strangers
        self._most = most
        self._all: set[Stranger] = set()
        # Admitted ones without a request at work, from the one that has rested the longest.
        self._resting: dict[Stranger, None] = {}
        self._evicted = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def evicted(self) -> int:
        """Number of those that have made room for others, strangers included."""
        return self._evicted + self.strangers.evicted

    def add(self, connection: Stranger) -> bool:
        """Add a new connection, as a stranger; another may have to go. False: all have requests at work."""
        if len(self._all) >= self._most and not self._make_room():
            return False
        self._all.add(connection)
        self.strangers.add(connection)
        return True

    def discard(self, connection: Stranger) -> None:
        """Forget one that is lost."""
        self._all.discard(connection)
        self._resting.pop(connection, None)
        self.strangers.discard(connection)

    def admit(self, connection: Stranger) -> None:
        """Note that a request of a stranger was admitted; it rests until the request is at work."""
        self.strangers.discard(connection)
        self._resting[connection] = None

    def begin_work(self, connection: Stranger) -> None:
        """Note that a request of an admitted connection is at work: it does not give way any more."""
        self._resting.pop(connection, None)

    def end_work(self, connection: Stranger) -> None:
        """Note that an admitted connection rests again."""
        if connection in self._all:
            self._resting[connection] = None

    def _make_room(self) -> bool:
        oldest = next(iter(self._resting), None)
        if oldest is None:
            oldest = self.strangers.evict_oldest()
        else:
            self._evicted += 1
            oldest.evict()
        if oldest is None:
            return False
        # At once: it may take a turn to go, and the next one must not find it here again.
        self.discard(oldest)
        return True
