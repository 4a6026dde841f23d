"""Spans of the request being handled, and the W3C trace context that travels with its calls.

This module does not import OpenTelemetry, and without a tracer nothing here does anything. Only
`serving/trace_export.py` makes one, when --tracing-endpoint asks for it. No span covers a single token: the stages of a
generation become spans when the request ends, from times that are kept anyway.

No prompt, text, token id or key may become an attribute.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from penstock.common.errors import PenstockError

# https://www.w3.org/TR/trace-context/
TRACEPARENT_KEY, TRACESTATE_KEY = "traceparent", "tracestate"
# Longest tracestate that is passed on; the recommendation asks for at least this.
MAX_STATE_CHARS = 512
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[ -~]*")
_INVALID_VERSION, _SAMPLED = "ff", 1

Attribute = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Attribute]


class SpanKind(Enum):
    """Side of a call that a span describes; INTERNAL: neither."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Name of a span for other processes: 32 and 16 hex digits; `state` is the tracestate of others, passed on."""

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        """Value of the W3C header."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


def parse_context(parent: object, state: object = "") -> TraceContext | None:
    """Return the context of W3C headers; None for an absent or malformed traceparent, which is not an error."""
    found = _TRACEPARENT.fullmatch(parent) if isinstance(parent, str) else None
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    # Later versions may add fields; version 00 has none.
    if version == _INVALID_VERSION or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    is_passed = isinstance(state, str) and len(state) <= MAX_STATE_CHARS and _STATE.fullmatch(state)
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), str(state) if is_passed else "")


class Span(ABC):
    """Work between two times. Times are time.monotonic(); None is now. Not for several threads at once."""

    context: TraceContext

    @abstractmethod
    def start(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        begin: float | None = None,
    ) -> Span:
        """Begin a child."""

    @abstractmethod
    def set(self, attributes: Attributes) -> None:
        """Add attributes."""

    @abstractmethod
    def fail(self, reason: str, *, is_fault: bool = True) -> None:
        """Note a failure by its reason. Without `is_fault` the reason is kept, but the status is not an error."""

    @abstractmethod
    def end(self, at: float | None = None) -> None:
        """End it; later calls do nothing."""

    @property
    def exemplar(self) -> str:
        """Trace id for a histogram's exemplar; empty if the trace is not kept."""
        return self.context.trace_id if self.context.is_sampled else ""

    def add(self, name: str, begin: float, end: float, attributes: Attributes | None = None) -> None:
        """Add a child that is over."""
        self.start(name, attributes=attributes, begin=begin).end(max(begin, end))

    def fail_by(self, error: BaseException | None) -> None:
        """Note a failure by its exception: its reason or type, never its text. None: it was given up."""
        if isinstance(error, PenstockError):
            self.fail(error.reason or error.code.name)
        elif error is None or isinstance(error, asyncio.CancelledError):
            self.fail("CANCELLED", is_fault=False)
        else:
            self.fail(type(error).__name__)


class Tracer(Protocol):
    """Maker of spans that have no parent in this process."""

    def start(
        self,
        name: str,
        kind: SpanKind,
        parent: TraceContext | None,
        attributes: Attributes | None = None,
        begin: float | None = None,
    ) -> Span:
        """Begin a span of `parent`'s trace, or of a new one."""


# Span of the call being handled, as `request_context.current_request_id`. None: no traces, or no request.
current_span: ContextVar[Span | None] = ContextVar("penstock_span", default=None)
# For handlers with many requests in one call. None: traces are off.
current_tracer: ContextVar[Tracer | None] = ContextVar("penstock_tracer", default=None)


def stage(
    name: str, kind: SpanKind = SpanKind.INTERNAL, attributes: Attributes | None = None
) -> AbstractContextManager[Span | None]:
    """Make the block a child of the current span, and calls in the block children of that. Does nothing without a kept
    trace."""
    outer = current_span.get()
    return _stage_of(outer, name, kind, attributes) if outer is not None and outer.context.is_sampled else _NO_STAGE


# One for all blocks without a trace: it holds nothing.
_NO_STAGE = nullcontext[Span | None](None)


@contextmanager
def _stage_of(outer: Span, name: str, kind: SpanKind, attributes: Attributes | None) -> Iterator[Span]:
    span = outer.start(name, kind, attributes)
    token = current_span.set(span)
    try:
        yield span
    except BaseException as error:
        span.fail_by(error)
        raise
    finally:
        current_span.reset(token)
        span.end()


def exemplar() -> str:
    """Return the current trace's id for a histogram's exemplar; empty without a kept trace."""
    span = current_span.get()
    return "" if span is None else span.exemplar


def outgoing(span: Span | None = None) -> tuple[tuple[str, str], ...]:
    """Return metadata (or HTTP headers) that put a call into `span`'s trace, by default the current span's."""
    span = span or current_span.get()
    if span is None:
        return ()
    context = span.context
    state = ((TRACESTATE_KEY, context.state),) if context.state else ()
    return ((TRACEPARENT_KEY, context.traceparent), *state)
