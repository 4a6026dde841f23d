"""Bounds on what one fault may write into the log: lines of a kind in a while, and the size of a traceback.

A kind is the place in the code that a line comes from: logger, level and event, the type and place of an exception,
and the service's own word for the cause (`reason`). What callers send never makes a new kind.
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

# Field of a line that its writer tells its place by, where the event may hold what others wrote; it is not written.
PLACE = "_place"
# Bytes of an exception, and of an event that a library wrote.
MOST_EXCEPTION_CHARS, MOST_EVENT_CHARS = 8 << 10, 256
# Kinds are places in the code. Should there be more, they share one bound.
_MOST_KINDS = 1024
# Lines of each level, as a multiple of the bound; debug has none. That all is well is told of every backend and
# adapter that a start finds.
_SHARES = {"info": 10, "warning": 1, "error": 1, "critical": 1}


@dataclass(frozen=True)
class LineBounds:
    """Bounds on the log of a process. Not slotted: the configuration names the defaults."""

    # Lines of a kind within `seconds`; 0: as many as there are.
    lines: int = 20
    seconds: float = 60.0


@dataclass(slots=True)
class _Kind:
    """Lines of one kind since a time."""

    since: float
    # Component, level and event, for the line that tells of those left out.
    shown: tuple[str, str, str]
    written: int = 0
    left_out: int = 0


class LineLimit:
    """Processor of structlog that leaves out lines of a kind beyond a bound, and tells how many."""

    def __init__(
        self,
        bounds: LineBounds,
        write: Callable[[dict[str, Any]], None],
        drop: type[BaseException],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make it. `write` writes a warning of these fields, past this processor; `drop` is raised for a line that is
        left out."""
        self._bounds, self._write, self._drop, self._clock = bounds, write, drop, clock
        self._kinds: dict[Hashable, _Kind] = {}
        # A handler of a signal may write a line in the middle of another.
        self._lock = threading.RLock()
        # Time at which kinds are looked through for those left out; a quiet log is told with its next line.
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
            known.written += 1
            is_over = known.written > most
            if is_over:
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
        """Begin to count a kind; `told` gets what it had left out."""
        if (before := self._kinds.get(kind)) is not None and before.left_out:
            told.append(self._said(before))
        elif before is None and len(self._kinds) >= _MOST_KINDS:
            kind = level
            if (shared := self._kinds.get(kind)) is not None and now - shared.since < self._bounds.seconds:
                return shared
        shown = str(event.get("component", "")), level, str(event.get("event", ""))[:MOST_EVENT_CHARS]
        made = self._kinds[kind] = _Kind(now, shown)
        return made

    def _collect(self, now: float) -> list[dict[str, Any]]:
        """Return what was left out of the kinds whose time is over."""
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


def _kind_of(event: EventDict, level: str, place: Any) -> Hashable:
    """Return the kind of a line."""
    error = event.get("exc_info")
    named = place if place is not None else event.get("event")
    reason = event.get("reason")
    kind = (event.get("component"), level, named, reason if isinstance(reason, str) else None)
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
    """Return a text of at most about `most` characters: its begin and its end, which tell most of a traceback."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} … {len(text) - 2 * (most // 2)} characters … {text[len(text) - most // 2 :]}"


def causes(error: BaseException, most: int = 8) -> Iterator[BaseException]:
    """Yield an exception and its causes, of which there may be any number."""
    at: BaseException | None = error
    while at is not None and most:
        yield at
        most -= 1
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
