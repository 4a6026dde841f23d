"""Handling around every call of every service: request id, authentication, admission, metrics, errors.

`admit` checks a call's token before its request is read, and `wrap` surrounds its handler. It is one interceptor rather
than a chain: each link of a chain costs a coroutine per call. Handlers raise `PenstockError`s; any other error becomes
Internal with its traceback in the log. A handler that is an async generator is closed before its call ends, so its
`finally` blocks run at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from penstock.common.credentials import BearerTokens
from penstock.common.errors import (
    Internal,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unauthenticated,
)
from penstock.common.errors import trailing_metadata as trailers_of
from penstock.common.logging import bind_trace, get_logger
from penstock.common.metrics import GrpcServerMetrics
from penstock.common.request_context import REQUEST_ID_KEY, accept_request_id, current_request_id
from penstock.common.tracing import (
    TRACEPARENT_KEY,
    TRACESTATE_KEY,
    Span,
    SpanKind,
    Tracer,
    current_span,
    current_tracer,
    parse_context,
)
from penstock.http2.metadata import Metadata
from penstock.serving.message_fields import bounded

# Multiple of the limit on a message's fields, for streams of requests: a router's message has more fields than the
# client's message in it, and an error would end the stream with the requests of all clients.
_STREAM_SHARE = 2
# A serving.transport.ServerCall; handlers of generated code take it for a grpc.aio.ServicerContext.
Context = Any
Behavior = Callable[[Any, Context], Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stub only
# (method's name, its handler) -> the handler to use.
Wrap = Callable[[str, Handler], Handler]
# (method's name, metadata) -> see CallInterceptor.admit.
Admit = Callable[[str, Metadata], bool]
# Services that answer without credentials and under any load: a probe must distinguish "busy" from "broken".
EXEMPT_SERVICES = frozenset({"grpc.health.v1.Health"})
OVERLOAD_RETRY_SECONDS = 0.5
# Methods with calls that do the work of one request and are spans of its trace. Others are polls, watches and commands,
# or carry many requests with their own spans.
TRACED_METHODS = frozenset(
    ("Chat", "Generate", "Score", "Embed", "DetectWatermark", "ApplyChatTemplate", "Encode", "Decode")
)
# Statuses that OpenTelemetry's conventions count as a server's own faults.
_FAULTS = frozenset(
    (
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    )
)

_log = get_logger("penstock.rpc")


@dataclass(frozen=True)
class _Method:
    """Method's name and metrics, looked up once."""

    service: str
    name: str
    started: Any
    handling: Any
    handled: Callable[[str], Any]
    # Tokens that it accepts; None: any call.
    tokens: BearerTokens | None


@dataclass(frozen=True, slots=True)
class _Refused:
    """Stand-in for a request that could not be parsed: its error is raised where all errors are handled."""

    error: Callable[[], Exception]


class CallInterceptor:
    """Wraps the handlers of a server. Used on the server's event loop only."""

    def __init__(
        self,
        metrics: GrpcServerMetrics,
        *,
        tracer: Tracer | None = None,
        tokens: BearerTokens | None,
        max_concurrent_rpcs: int,
        max_message_fields: int,
        service_tokens: Mapping[str, BearerTokens] | None = None,
        is_known: Callable[[str | bytes | None], bool] | None = None,
    ) -> None:
        """Make it; ServerConfig explains the limits. `service_tokens` replace `tokens` for a service, or for a method
        ("/package.Service/Name"), which takes precedence, or, under "", for all others. `tracer` None: no call is
        traced. `is_known`: see serving.server.ChecksCallers; None where tokens alone decide."""
        self._max_message_fields = max_message_fields
        self._metrics = metrics
        self._tracer = tracer
        self._tokens = tokens
        self._service_tokens = service_tokens or {}
        self._is_known = is_known
        self._max_concurrent_rpcs = max_concurrent_rpcs
        self._in_flight = 0
        # Methods used so far, by name.
        self._methods: dict[str, _Method] = {}
        # Calls of these that are not over: a reset call holds no slot while its handler ends.
        self._held = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Number of calls being handled, health checks excluded."""
        return self._in_flight

    async def wait_idle(self) -> None:
        """Return once no call is in flight."""
        await self._idle.wait()

    def wrap(self, name: str, inner: Handler) -> Handler:
        """Wrap the handler of the method `name` ("/package.Service/Name"), of any kind, as a coroutine."""
        method = self._methods[name] = self._method(name, inner)
        behavior = behavior_of(inner)
        run = _answer_stream if inner.response_streaming else _answer_once

        async def handle(request: Any, context: Context) -> Any:
            return await self._around(method, lambda: run(behavior, request, context), context)

        deserializer = inner.request_deserializer
        if deserializer is not None:
            most = self._max_message_fields * (_STREAM_SHARE if inner.request_streaming else 1)
            deserializer = bounded(deserializer, most)
        return handler_like(inner, handle, deserializer if inner.request_streaming else _lenient(deserializer))

    def admit(self, name: str, metadata: Metadata) -> bool:
        """Check a call of a wrapped method before its request is read.

        Return True for a call admitted by its token (or if none is required), False for one that needs none. Raises
        Unauthenticated, or what the tokens raise; `refusal_trailers` has its trailers.
        """
        method = self._methods[name]
        if method.service in EXEMPT_SERVICES:
            return False
        if self._is_known is not None:
            return self._is_known(_last(metadata, "authorization"))
        if method.tokens is None:
            return True
        try:
            if method.tokens.accepts(_last(metadata, "authorization")):
                return True
        except PenstockError as error:
            self._count_refused(method, error.code)
            raise
        self._count_refused(method, grpc.StatusCode.UNAUTHENTICATED)
        raise Unauthenticated("a valid bearer token is required", reason="UNAUTHENTICATED")

    @staticmethod
    def _count_refused(method: _Method, code: grpc.StatusCode) -> None:
        method.started.inc()
        method.handled(code.name).inc()
        method.handling.observe(0.0)

    def _method(self, name: str, handler: Handler) -> _Method:
        kinds = ("unary", "client_stream", "server_stream", "bidi_stream")
        kind = kinds[bool(handler.request_streaming) + 2 * bool(handler.response_streaming)]
        _, service, method = name.split("/")
        labels = (kind, service, method)
        counters: dict[str, Any] = {}

        def handled(code: str) -> Any:
            if code not in counters:
                counters[code] = self._metrics.handled.labels(*labels, code)
            return counters[code]

        found = (self._service_tokens[one] for one in (name, service, "") if one in self._service_tokens)
        tokens = next(found, self._tokens)
        return _Method(
            service,
            method,
            self._metrics.started.labels(*labels),
            self._metrics.handling.labels(*labels),
            handled,
            tokens,
        )

    async def _around(self, method: _Method, run: Callable[[], Awaitable[Any]], context: Context) -> Any:
        begin = time.perf_counter()
        method.started.inc()
        counted = method.service not in EXEMPT_SERVICES
        metadata = dict(context.invocation_metadata() or ())
        request_id = accept_request_id(metadata.get(REQUEST_ID_KEY))
        current_request_id.set(request_id)
        code, reason = grpc.StatusCode.OK, ""
        span = None if self._tracer is None else _begin_span(self._tracer, method, metadata)
        if counted:
            self._enter(context)
        try:
            if counted:
                self._check_room()
            context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
            answer = await run()
            code = context.code()
            return answer
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.AbortError:
            code = context.code()
            raise
        except grpc.aio.InternalError:
            # A write to a call that is over: nobody is left to tell, and there would be endless log lines.
            code = grpc.StatusCode.CANCELLED
            raise asyncio.CancelledError from None
        except Exception as raised:
            error = _as_penstock_error(raised, request_id)
            code, message, reason = error.code, error.message, error.reason
            trailers = (*trailers_of(error), (REQUEST_ID_KEY, request_id))
            # The error's traceback has this frame, which has the request: a cycle until a garbage collection.
            del error
            await context.abort(code, message, trailers)
        finally:
            if counted:
                self._leave()
            method.handled(code.name).inc()
            method.handling.observe(
                time.perf_counter() - begin, None if span is None else _end_span(span, code, reason)
            )

    def _enter(self, context: Context) -> None:
        self._in_flight += 1
        self._held += 1
        self._idle.clear()
        context.when_over(self._give_slot_back)

    def _give_slot_back(self) -> None:
        self._held -= 1

    def _leave(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()

    def _check_room(self) -> None:
        if self._held > self._max_concurrent_rpcs:
            raise ResourceExhausted(
                "too many calls in flight", reason="TOO_MANY_RPCS", retry_after_seconds=OVERLOAD_RETRY_SECONDS
            )


def _begin_span(tracer: Tracer, method: _Method, metadata: Mapping[str, Any]) -> Span | None:
    """Begin the span of a call that does the work of one request, for its handler and the log. None for other calls."""
    current_tracer.set(tracer)
    if method.name not in TRACED_METHODS:
        return None
    parent = parse_context(metadata.get(TRACEPARENT_KEY), metadata.get(TRACESTATE_KEY, ""))
    attributes = {"rpc.system": "grpc", "rpc.service": method.service, "rpc.method": method.name}
    span = tracer.start(f"{method.service}/{method.name}", SpanKind.SERVER, parent, attributes)
    current_span.set(span)
    bind_trace(span.context.trace_id)
    return span


def _end_span(span: Span, code: grpc.StatusCode, reason: str) -> dict[str, str] | None:
    """End the span of a call; return its exemplar."""
    span.set({"rpc.grpc.status_code": code.value[0]})
    if code is not grpc.StatusCode.OK:
        span.fail(reason or code.name, is_fault=code in _FAULTS)
    span.end()
    return {"trace_id": span.exemplar} if span.exemplar else None


def behavior_of(handler: Handler) -> Behavior:
    """Return the function of a handler of any kind."""
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return cast("Behavior", next(kind for kind in kinds if kind is not None))


def handler_like(
    handler: Handler,
    behavior: Behavior,
    deserializer: Callable[[bytes], Any] | None,
    *,
    takes_stream: bool | None = None,
) -> Handler:
    """Make a handler of the same kind (or one that takes a stream), with the same serializer."""
    is_stream = bool(handler.request_streaming) if takes_stream is None else takes_stream
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[is_stream, bool(handler.response_streaming)]
    made: Handler = make(behavior, request_deserializer=deserializer, response_serializer=handler.response_serializer)
    return made


def refusal_trailers(error: PenstockError, metadata: Metadata) -> Metadata:
    """Return the trailers of a call that `admit` refused."""
    request_id = _last(metadata, REQUEST_ID_KEY)
    return (*trailers_of(error), (REQUEST_ID_KEY, accept_request_id(request_id)))


def _last(metadata: Metadata, key: str) -> str | bytes | None:
    return next((value for name, value in reversed(metadata) if name == key), None)


def _lenient(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserializer is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return _Refused(DecodeError)
        except InvalidArgument as error:
            # A new error: the old one's traceback has all of the request's bytes.
            return _Refused(partial(InvalidArgument, error.field or "", error.description, reason=error.reason))

    return parse


async def _answer_once(behavior: Behavior, request: Any, context: Context) -> Any:
    if isinstance(request, _Refused):
        raise request.error()
    return await behavior(request, context)


async def _answer_stream(behavior: Behavior, request: Any, context: Context) -> None:
    if isinstance(request, _Refused):
        raise request.error()
    answer = behavior(request, context)
    if not isinstance(answer, AsyncIterator):
        await answer
        return
    async with contextlib.aclosing(cast("Any", answer)) as messages:
        async for message in messages:
            await context.write(message)


def _as_penstock_error(raised: Exception, request_id: str) -> PenstockError:
    if isinstance(raised, PenstockError):
        if isinstance(raised, Internal):
            _log.error("call failed", request_id=request_id, reason=raised.reason, exc_info=raised)
        return raised
    if isinstance(raised, DecodeError):
        return InvalidArgument("request", "not a message of this type", reason="MALFORMED_MESSAGE")
    _log.error("call failed", request_id=request_id, reason="INTERNAL", exc_info=raised)
    return Internal("internal error; the log has the cause under this request id", reason="INTERNAL")
