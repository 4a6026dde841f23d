"""Bytes of requests that a server may hold for its clients before handlers take them."""

from __future__ import annotations

from collections.abc import Callable


class RequestBytes:
    """Budget of bytes: of a process, or of one connection within it. Belongs to one event loop.

    A request that is larger than a stream's first window asks for all of its bytes before more of it is let in, so many
    large requests of a connection come one after the other instead of being held half-way each.
    """

    def __init__(self, most: int, parent: RequestBytes | None = None) -> None:
        """Make it. `parent`: the budget that this one is a part of."""
        self.most = most
        self.held = 0
        self._parent = parent
        # Requests that wait for room, in order; each tries again, and returns False while there is none.
        self._waiting: dict[Callable[[], bool], None] = {}
        self._is_retrying = False

    def take(self, size: int) -> bool:
        """Count `size` more bytes; False, and nothing is counted, where there is no room for them."""
        if self.held + size > self.most or (self._parent is not None and not self._parent.take(size)):
            return False
        self.held += size
        return True

    def is_parent_full(self, size: int) -> bool:
        """True when `size` more bytes have room here, and none in the process."""
        return self.held + size <= self.most

    def wait(self, retry: Callable[[], bool]) -> None:
        """Call `retry` whenever bytes are given back, until it returns True."""
        self._waiting[retry] = None

    def stop_waiting(self, retry: Callable[[], bool]) -> None:
        """Forget one that waits no longer; those behind it may have room."""
        self._waiting.pop(retry, None)
        self._retry()

    def give_back(self, size: int) -> None:
        """Count `size` bytes less, and let those try again that wait."""
        self.held -= size
        if self._parent is not None:
            self._parent.give_back(size)
        self._retry()

    def _retry(self) -> None:
        if self._is_retrying:
            return  # one that tries again may end a request
        self._is_retrying = True
        try:
            while self._waiting:
                first = next(iter(self._waiting))
                if not first():
                    return
                self._waiting.pop(first, None)
        finally:
            self._is_retrying = False
