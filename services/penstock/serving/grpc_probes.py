"""Calls of a grpc.aio server that need no credentials: limits on their number, and the oldest makes room."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import grpc


class GrpcProbe(Protocol):
    """A call, for this module."""

    def cut_off(self, code: grpc.StatusCode, details: str) -> None:
        """End it with a status, and its handler, whatever it waits for."""


class GrpcProbes:
    """Such calls of one server, from the oldest. Belongs to one event loop."""

    def __init__(self, most: int, most_each: int) -> None:
        """Make it for at most `most` calls in all, and `most_each` of one client."""
        self._most, self._most_each = most, most_each
        self._calls: dict[GrpcProbe, str] = {}
        self._of_client: Counter[str] = Counter()

    def add(self, call: GrpcProbe, client: str) -> bool:
        """Add a call; where they are too many, the oldest ends. False: its client has too many."""
        if self._of_client[client] >= self._most_each:
            return False
        if len(self._calls) >= self._most:
            # A health check is always answered, however many clients watch.
            oldest = next(iter(self._calls))
            self.discard(oldest)
            oldest.cut_off(grpc.StatusCode.RESOURCE_EXHAUSTED, "newer calls without credentials take its place")
        self._calls[call] = client
        self._of_client[client] += 1
        return True

    def discard(self, call: GrpcProbe) -> None:
        """Forget a call that has ended; a second time does nothing."""
        client = self._calls.pop(call, None)
        if client is None:
            return
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]
