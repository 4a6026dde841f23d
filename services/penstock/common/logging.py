"""Structured logs: JSON, or readable lines on a terminal. Never contents, token ids, keys or raw client strings.

An exception is written as its types and frames. Its text may quote a user's input, so it appears only with --debug.
The number of lines of one kind is limited (log_limits.py).
"""

from __future__ import annotations

import json
import logging as stdlib
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, cast

from penstock.common.deferred import absent
from penstock.common.log_limits import (
    MOST_EVENT_CHARS,
    MOST_EXCEPTION_CHARS,
    PLACE,
    LineBounds,
    LineLimit,
    causes,
    shortened,
)

# Hidden: rich would cost every process 5 MiB and 0.05 s only to print tracebacks, which `describe_exception` does here.
with absent("rich"):
    import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

_DEFAULT_BOUNDS = LineBounds()
_LEVELS = {"debug": stdlib.DEBUG, "info": stdlib.INFO, "warning": stdlib.WARNING, "error": stdlib.ERROR}
# Libraries with loggers that write to stderr through their own handlers, made on import.
_SELF_WRITING = ("transformers", "huggingface_hub")
# Logger of grpc's core, and the exceptions that it logs as errors when a caller merely left.
_GRPC_CORE, _CALLER_LEFT = "grpc._cython.cygrpc", ("CancelledError", "ExecuteBatchError")
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def get_logger(name: str) -> FilteringBoundLogger:
    """Make a logger with `component=name` in its lines. Bind only values from closed sets, counts and request ids."""
    return cast("FilteringBoundLogger", structlog.get_logger(component=name))


def bind_trace(trace_id: str) -> None:
    """Put the trace's id into all further lines of this task, and of tasks that it starts."""
    structlog.contextvars.bind_contextvars(trace_id=trace_id)


def configure_logging(
    service: str,
    *,
    log_format: str = "auto",
    level: str = "info",
    debug: bool = False,
    bounds: LineBounds = _DEFAULT_BOUNDS,
) -> None:
    """Set up this process's logging, once, at the start of its main function."""
    console = sys.stderr.isatty() if log_format == "auto" else log_format == "console"

    def add_service(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    def render_exception(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        exc_info = event.pop("exc_info", None)
        if exc_info:
            event["exception"] = describe_exception(_as_exc_info(exc_info), debug=debug)
        return event

    last: Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if console
        else structlog.processors.JSONRenderer(_as_json)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            # Before anything that takes time.
            line_limit(bounds),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            add_service,
            render_exception,
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    root = stdlib.getLogger()
    root.handlers[:] = [_Forward(debug=debug)]
    for name in _SELF_WRITING:
        stdlib.getLogger(name).__class__ = _ForwardedLogger
    root.setLevel(max(_LEVELS[level], stdlib.WARNING))

    def log_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
    ) -> None:
        # They are for developers, and may quote a user's input.
        told = {"text": str(message)} if debug else {}
        where = f"{_short(filename)}:{lineno}"
        get_logger("python").info(
            "a library warns", category=category.__name__, where=where, **told, **{PLACE: (where, category)}
        )

    # Not to stderr, where they would mix with the lines of a start.
    warnings.showwarning = log_warning


@cache
def _encoder(default: Callable[[Any], Any]) -> json.JSONEncoder:
    """Make the encoder of all lines: json.dumps makes one for each."""
    return json.JSONEncoder(default=default)


def _as_json(event: EventDict, default: Callable[[Any], Any]) -> str:
    return _encoder(default).encode(event)


def line_limit(bounds: LineBounds) -> LineLimit:
    """Make the processor that limits lines of one kind; it reports the omitted ones through the logger itself."""

    def write_left_out(fields: dict[str, Any]) -> None:
        # A separate place for each kind: there are only as many as kinds.
        place = (fields["of"], fields["of_level"], fields["of_event"])
        get_logger("penstock.log").warning("lines of one kind were left out", **fields, **{PLACE: place})

    return LineLimit(bounds, write_left_out, structlog.DropEvent)


def is_json_log() -> bool:
    """True when this process's log is JSON: then nothing else may be written to stderr."""
    processors: list[Any] = structlog.get_config()["processors"] if structlog.is_configured() else []
    return bool(processors) and isinstance(processors[-1], structlog.processors.JSONRenderer)


def log_crashes() -> None:
    """Write uncaught errors as log records; Python would write tracebacks to stderr."""
    log = get_logger("penstock.crash")

    def on_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log.error("an error ends the process", exc_info=(kind, error, trace))

    def on_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            name = args.thread.name if args.thread is not None else ""
            log.error("an error ended a thread", thread=name, exc_info=args.exc_value)

    def on_unraisable(args: sys.UnraisableHookArgs) -> None:
        log.error("an error could not be raised", exc_info=args.exc_value)

    sys.excepthook, threading.excepthook, sys.unraisablehook = on_end, on_thread, on_unraisable


def configure_quiet_logging() -> None:
    """Send only warnings and errors to stderr in a program that uses Penstock as a library; without a configuration,
    every line would go to its standard output. Do nothing if it has configured structlog itself."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            line_limit(_DEFAULT_BOUNDS),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(stdlib.WARNING),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )


def _as_exc_info(exc_info: Any) -> ExcInfo | None:
    if isinstance(exc_info, BaseException):
        return type(exc_info), exc_info, exc_info.__traceback__
    found = exc_info if isinstance(exc_info, tuple) else sys.exc_info()
    return cast("ExcInfo", found) if found[0] is not None else None


def describe_exception(exc_info: ExcInfo | None, *, debug: bool) -> str:
    """Return types and frames of an exception and its causes, innermost last; with `debug` the full traceback.

    A part that is too long loses its middle.
    """
    if exc_info is None:
        return ""
    if debug:
        return shortened("".join(traceback.format_exception(*exc_info)).rstrip())
    parts: list[str] = []
    for error in causes(exc_info[1]):
        where = " > ".join(describe_frames(traceback.walk_tb(error.__traceback__)))
        parts.append(shortened(f"{type(error).__name__} at {where}", MOST_EXCEPTION_CHARS // 4))
    return shortened(" <- ".join(parts))


def describe_frames(frames: Iterable[tuple[FrameType, int]]) -> list[str]:
    """Return `file:line function` of each frame from traceback.walk_tb or walk_stack."""
    return [f"{_short(frame.f_code.co_filename)}:{line} {frame.f_code.co_name}" for frame, line in frames]


def _short(filename: str) -> str:
    _, found, inside = filename.rpartition("/penstock/")
    return f"penstock/{inside}" if found else filename.rpartition("/site-packages/")[2]


class _ForwardedLogger(stdlib.Logger):
    """Logger of a library that would write on its own: its lines go where all others go."""

    propagate = property(lambda _: True, lambda _, __: None)

    def addHandler(self, hdlr: stdlib.Handler) -> None:
        """Add nothing."""


class _Forward(stdlib.Handler):
    """Handler that logs libraries' warnings in Penstock's format; arguments, perhaps contents, only with --debug."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__()
        self._debug = debug

    def emit(self, record: stdlib.LogRecord) -> None:
        event = record.getMessage() if self._debug else str(record.msg).partition("\n")[0]
        # The kind of a message that a library has formatted itself is the line of code that wrote it.
        place = {PLACE: (record.pathname, record.lineno)}
        log = get_logger(record.name)
        write = log.error if record.levelno >= stdlib.ERROR else log.warning
        kind = record.exc_info[0] if record.exc_info else None
        if record.name == _GRPC_CORE and kind is not None and kind.__name__ in _CALLER_LEFT:
            write = log.debug
        write(shortened(event, MOST_EVENT_CHARS), exc_info=record.exc_info, **place)
