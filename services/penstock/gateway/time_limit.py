"""Limit of the time that a connection waits for its other end: it waits for one thing at a time."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable


class Awaited(enum.Enum):
    """Debt of the other end of a connection."""

    # The rest of a head, or a connection's first one.
    HEAD = enum.auto()
    # The rest of a body that has its answer already: a handler limits the time of all others.
    BODY = enum.auto()
    # The next request, behind an answer.
    REQUEST = enum.auto()
    # To let the connection end, behind a refusal (UnsentWatch has the other ends).
    END = enum.auto()


class TimeLimit:
    """The timer of one connection. Belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._awaited: Awaited | None = None
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, awaited: Awaited, seconds: float, give_up: Callable[[], None]) -> None:
        """Call `give_up` after `seconds`. A wait for the same goes on: more bytes of it give no more time."""
        if awaited is not self._awaited:
            self.stop()
            self._awaited, self._timer = awaited, self._loop.call_later(seconds, give_up)

    def stop(self) -> None:
        """Wait for nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._awaited = self._timer = None
