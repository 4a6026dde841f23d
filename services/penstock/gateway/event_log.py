"""Events of answers that are made in the background, kept for readers that come later or come again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from penstock.common.errors import FailedPrecondition, InvalidArgument

# Events of one piece for a reader who is behind.
_EVENTS_AT_ONCE = 256


def no_events() -> FailedPrecondition:
    """Return the error of a reader who asks for events that are not kept."""
    return FailedPrecondition(
        "the events of this response are not kept here: it was made without stream, by another gateway, or too long "
        "ago (--background-event-bytes, --background-event-seconds); read it without stream",
        reason="EVENTS_NOT_KEPT",
    )


class EventLog:
    """Events of one answer, by their numbers from 0 on. Belongs to one event loop."""

    def __init__(self, logs: EventLogs) -> None:
        """Make it in `logs`, which bound it."""
        self._logs = logs
        self._events: list[bytes] = []
        self.is_dropped = self._is_ended = False
        # Replaced with each change: a reader waits for the one that it saw.
        self._changed = asyncio.Event()
        self.num_bytes = 0

    def add(self, events: list[bytes]) -> None:
        """Add events."""
        if self.is_dropped or not events:
            return
        self._events += events
        size = sum(map(len, events))
        self.num_bytes += size
        self._logs.grow(size)
        self._notify()

    def end(self) -> None:
        """Note that there are no more; they are kept for a time."""
        self._is_ended = True
        self._notify()
        self._logs.retire(self)

    def drop(self) -> None:
        """Forget the events; readers get an error."""
        self.is_dropped = True
        self._events.clear()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, after: int = -1) -> AsyncIterator[bytes]:
        """Yield the events behind the number `after`, those that are there in pieces.

        Raises FailedPrecondition, and InvalidArgument where there are none, and come none.
        """
        place = after + 1
        while True:
            if self.is_dropped:
                raise no_events()
            if place < len(self._events):
                events = self._events[place : place + _EVENTS_AT_ONCE]
                place += len(events)
                yield b"".join(events)
            elif self._is_ended:
                if place == after + 1:
                    raise InvalidArgument("starting_after", "is the number of the last event, or beyond it")
                return
            else:
                await self._changed.wait()


class EventLogs:
    """All logs of a gateway: the oldest go when they have too many bytes, and ended ones after a time."""

    def __init__(self, max_bytes: int, seconds: float) -> None:
        """`max_bytes`: of all events. `seconds`: life of an ended log."""
        self._max_bytes, self._seconds = max_bytes, seconds
        self._logs: dict[EventLog, asyncio.TimerHandle | None] = {}
        self.num_bytes = 0

    def open(self) -> EventLog:
        """Make a log."""
        log = EventLog(self)
        self._logs[log] = None
        return log

    def grow(self, size: int) -> None:
        """Count bytes of an event, and drop the oldest logs if there are too many."""
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._logs)))

    def retire(self, log: EventLog) -> None:
        """Keep an ended log for its time."""
        if log in self._logs:
            self._logs[log] = asyncio.get_running_loop().call_later(self._seconds, self._drop, log)

    def _drop(self, log: EventLog) -> None:
        if (timer := self._logs.pop(log)) is not None:
            timer.cancel()
        self.num_bytes -= log.num_bytes
        log.drop()

    def close(self) -> None:
        """Drop all of them."""
        for log in list(self._logs):
            self._drop(log)
