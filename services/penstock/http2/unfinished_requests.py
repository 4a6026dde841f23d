"""Calls with an incomplete only request: they end when it takes too long to come."""

from __future__ import annotations

import asyncio

import grpc

from penstock.http2.limits import Limits
from penstock.http2.server_call import Call


def came_too_slowly(seconds: float) -> str:
    """Return the details of a call's status when its request took longer than `seconds`."""
    return f"the request did not arrive within {seconds:g} s"


class UnfinishedRequests:
    """Such calls of one connection, from the oldest. Belongs to one event loop."""

    __slots__ = ("_limits", "_timer", "calls")

    def __init__(self, limits: Limits) -> None:
        """Make it: there are none."""
        self._limits = limits
        self.calls: dict[int, Call] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: Call) -> None:
        """Add a call; `watch` looks after it."""
        self.calls[call.stream] = call

    def discard(self, call: Call) -> None:
        """Forget a call: its request is complete, or it is over."""
        self.calls.pop(call.stream, None)

    def stop(self) -> None:
        """Stop looking: the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()

    def watch(self) -> None:
        """Look after the calls that there are, if nobody does yet."""
        if self.calls and self._timer is None:
            seconds = self._limits.handshake_seconds / 2
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        limits = self._limits
        for call in list(self.calls.values()):
            most = limits.handshake_seconds if call.is_probe else limits.request_seconds
            if call.age_seconds > most:
                call.finish(grpc.StatusCode.DEADLINE_EXCEEDED, came_too_slowly(most))
                call.gone()
        self.watch()
