"""Limits on what one fault may write into the log: lines of one kind in a period, and the size of a traceback.

A kind is the place in the code that a line comes from: logger, level and event, the type and place of an exception,
and the service's own word for the cause (`reason`). Callers' input never makes a new kind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from structlog.typing import EventDict, WrappedLogger

# Field by which a line's writer gives its place, if the event may hold foreign text; it is not written.
PLACE = "_place"
# Most characters of an exception, and of a library's event.
MOST_EXCEPTION_CHARS, MOST_EVENT_CHARS = 8 << 10, 256
# Most kinds, since they are places in the code. Any further ones share one limit.
_MOST_KINDS = 1024
# Lines of each level, as a multiple of the limit; debug has none. A start reports success for every backend and adapter
# that it finds.
_SHARES = {"info": 10, "warning": 1, "error": 1, "critical": 1}
# Full kinds of one event, such as the reasons for which requests are refused. Beyond that many lines of an event, each
# of its kinds has the limit of a warning: one caller can find dozens of reasons.
_FULL_KINDS = 8


@dataclass(frozen=True)
class LineBounds:
    """Limits on the log of a process. Not slotted: the configuration names the defaults."""

    # Lines of one kind within `seconds`; 0: no limit.
    lines: int = 20
    seconds: float = 60.0


@dataclass(slots=True)
class _Kind:
    """Lines of one kind since a time."""

    since: float
    # Component, level and event, for the line about the omitted ones.
    shown: tuple[str, str, str]
    written: int = 0
    left_out: int = 0


@dataclass(slots=True)
class _Event:
    """Lines of all kinds of one event that were written since a time."""

    since: float
    written: int = 0


class LineLimit:
    """Processor of structlog that omits lines of one kind beyond a limit, and counts them."""

    def __init__(
        self,
        bounds: LineBounds,
        write: Callable[[dict[str, Any]], None],
        drop: type[BaseException],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make it. `write` writes a warning with fields, past this processor; `drop` is raised for an omitted line."""
        self._bounds, self._write, self._drop, self._clock = bounds, write, drop, clock
        self._kinds: dict[Hashable, _Kind] = {}
        # Component, level and place.
        self._events: dict[Hashable, _Event] = {}
        # A handler of a signal may write a line in the middle of another.
        self._lock = threading.RLock()
        # Time of the next check for omitted lines; in a quiet log, its next line triggers the check.
        self._looked_at = clock()
        self._are_left_out = False

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
        """Return the line, or raise."""
        place = event.pop(PLACE, None)
        level = event.get("level", "")
        most = self._bounds.lines * _SHARES.get(level, 0)
        if not most:
            return event
        now, told = self._clock(), []
        kind = _kind_of(event, level, place)
        with self._lock:
            if self._are_left_out and now - self._looked_at >= self._bounds.seconds:
                told = self._collect(now)
            known = self._kinds.get(kind)
            if known is None or now - known.since >= self._bounds.seconds:
                known = self._begin(kind, event, level, now, told)
            of_event = self._event_of(kind, now)
            if of_event.written >= _FULL_KINDS * most:
                most = self._bounds.lines
            known.written += 1
            is_over = known.written > most
            if not is_over:
                of_event.written += 1
            else:
                known.left_out += 1
                self._are_left_out = True
        for each in told:
            self._write(each)
        if is_over:
            raise self._drop
        if known.written == most:
            event["further"] = f"left out for {self._bounds.seconds:g} s (--log-lines)"
        return event

    def _begin(self, kind: Hashable, event: EventDict, level: str, now: float, told: list[dict[str, Any]]) -> _Kind:
        """Begin to count a kind; `told` gets the lines that it had omitted."""
        if (before := self._kinds.get(kind)) is not None and before.left_out:
            told.append(self._said(before))
        elif before is None and len(self._kinds) >= _MOST_KINDS:
            kind = level
            if (shared := self._kinds.get(kind)) is not None and now - shared.since < self._bounds.seconds:
                return shared
        shown = str(event.get("component", "")), level, str(event.get("event", ""))[:MOST_EVENT_CHARS]
        made = self._kinds[kind] = _Kind(now, shown)
        return made

    def _event_of(self, kind: tuple[Hashable, ...], now: float) -> _Event:
        """Return the count of a kind's event."""
        event = kind[:3]
        known = self._events.get(event)
        if known is None or now - known.since >= self._bounds.seconds:
            if known is None and len(self._events) >= _MOST_KINDS:
                self._events.clear()
            known = self._events[event] = _Event(now)
        return known

    def _collect(self, now: float) -> list[dict[str, Any]]:
        """Return the omitted lines of the kinds with an ended period."""
        self._looked_at, found = now, []
        for known in self._kinds.values():
            if known.left_out and now - known.since >= self._bounds.seconds:
                found.append(self._said(known))
                known.left_out = 0
        self._are_left_out = any(known.left_out for known in self._kinds.values())
        return found

    def _said(self, known: _Kind) -> dict[str, Any]:
        component, level, event = known.shown
        return {"of": component, "of_level": level, "of_event": event, "lines": known.left_out}


def _kind_of(event: EventDict, level: str, place: Any) -> tuple[Hashable, ...]:
    """Return the kind of a line: what names its event, and what tells it apart."""
    error = event.get("exc_info")
    named = place if place is not None else event.get("event")
    reason = event.get("reason")
    kind: tuple[Hashable, ...] = event.get("component"), level, named, reason if isinstance(reason, str) else None
    if not error:
        return kind
    if isinstance(error, tuple):
        error = error[1]
    if not isinstance(error, BaseException):
        return kind
    return (*kind, type(error), _place_of(error.__traceback__))


def _place_of(trace: TracebackType | None) -> tuple[str, int] | None:
    """File and line that an exception was raised at."""
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


def shortened(text: str, most: int = MOST_EXCEPTION_CHARS) -> str:
    """Return a text of at most about `most` characters: its start and its end, the useful parts of a traceback."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} … {len(text) - 2 * (most // 2)} characters … {text[len(text) - most // 2 :]}"


def causes(error: BaseException, most: int = 8) -> Iterator[BaseException]:
    """Yield an exception and any number of causes."""
    at: BaseException | None = error
    while at is not None and most:
        yield at
        most -= 1
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
