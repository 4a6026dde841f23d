"""Bytes of requests that a server may hold for its clients before handlers take them."""

from __future__ import annotations

from collections.abc import Callable


class RequestBytes:
    """Budget of bytes: for a process, or for one connection in it. Belongs to one event loop.

    A request larger than a stream's first window asks for all of its bytes before more of it is let in. So a
    connection's large requests come one after the other, instead of each being held half-way.
    """

    def __init__(self, most: int, parent: RequestBytes | None = None) -> None:
        """Make it. `parent`: the budget that contains this one."""
        self.most = most
        self.held = 0
        self._parent = parent
        # Retries of requests that wait for room, in order; each returns False while there is none.
        self._waiting: dict[Callable[[], bool], None] = {}
        self._is_retrying = False

    def take(self, size: int) -> bool:
        """Count `size` more bytes; without room for them, count nothing and return False."""
        if self.held + size > self.most or (self._parent is not None and not self._parent.take(size)):
            return False
        self.held += size
        return True

    def is_parent_full(self, size: int) -> bool:
        """True when there is room for `size` more bytes here, but not in the process."""
        return self.held + size <= self.most

    def wait(self, retry: Callable[[], bool]) -> None:
        """Call `retry` whenever bytes are given back, until it returns True."""
        self._waiting[retry] = None

    def stop_waiting(self, retry: Callable[[], bool]) -> None:
        """Forget a request that no longer waits; those behind it may have room."""
        self._waiting.pop(retry, None)
        self._retry()

    def give_back(self, size: int) -> None:
        """Count `size` bytes less, and let waiting requests try again."""
        self.held -= size
        if self._parent is not None:
            self._parent.give_back(size)
        self._retry()

    def _retry(self) -> None:
        if self._is_retrying:
            return  # a retry may end a request
        self._is_retrying = True
        try:
            while self._waiting:
                first = next(iter(self._waiting))
                if not first():
                    return
                self._waiting.pop(first, None)
        finally:
            self._is_retrying = False
