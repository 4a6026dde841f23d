"""Handling around every call of every service: request id, authentication, admission, metrics, errors.

It is one interceptor rather than a chain: each link of a chain costs a coroutine per call. Handlers raise
`PenstockError`s; any other error becomes Internal with its traceback in the log. A handler that is an async generator
is closed before its call ends, so its `finally` blocks run at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from penstock.common.credentials import TokenFile
from penstock.common.errors import (
    Internal,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unauthenticated,
)
from penstock.common.errors import trailing_metadata as trailers_of
from penstock.common.logging import get_logger
from penstock.common.metrics import GrpcServerMetrics
from penstock.common.request_context import REQUEST_ID_KEY, accept_request_id, current_request_id

# A serving.transport.ServerCall; handlers of generated code take it for a grpc.aio.ServicerContext.
Context = Any
Behavior = Callable[[Any, Context], Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stub only
# (method's name, its handler) -> the handler to use.
Wrap = Callable[[str, Handler], Handler]
# Services that answer without credentials and under any load: a probe must tell "busy" from "broken".
EXEMPT_SERVICES = frozenset({"grpc.health.v1.Health"})
OVERLOAD_RETRY_SECONDS = 0.5

_log = get_logger("penstock.rpc")


@dataclass(frozen=True)
class _Method:
    """Method's name and metrics, looked up once."""

    service: str
    started: Any
    handling: Any
    handled: Callable[[str], Any]


class _Malformed:
    """Placeholder for a request that could not be parsed, so that its error is raised where all errors are."""


_MALFORMED = _Malformed()


class CallInterceptor:
    """Wraps the handlers of a server. Used on the server's event loop only."""

    def __init__(self, metrics: GrpcServerMetrics, *, tokens: TokenFile | None, max_concurrent_rpcs: int) -> None:
        self._metrics = metrics
        self._tokens = tokens
        self._max_concurrent_rpcs = max_concurrent_rpcs
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Number of calls being handled, without health checks."""
        return self._in_flight

    async def wait_idle(self) -> None:
        """Return once no call is in flight."""
        await self._idle.wait()

    def wrap(self, name: str, inner: Handler) -> Handler:
        """Wrap the handler of the method `name` ("/package.Service/Name"), of any kind, as a coroutine."""
        method = self._method(name, inner)
        behavior = behavior_of(inner)
        run = _answer_stream if inner.response_streaming else _answer_once

        async def handle(request: Any, context: Context) -> Any:
            return await self._around(method, lambda: run(behavior, request, context), context)

        deserializer = inner.request_deserializer if inner.request_streaming else _lenient(inner.request_deserializer)
        return handler_like(inner, handle, deserializer)

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

        return _Method(service, self._metrics.started.labels(*labels), self._metrics.handling.labels(*labels), handled)

    async def _around(self, method: _Method, run: Callable[[], Awaitable[Any]], context: Context) -> Any:
        begin = time.perf_counter()
        method.started.inc()
        counted = method.service not in EXEMPT_SERVICES
        metadata = dict(context.invocation_metadata() or ())
        request_id = accept_request_id(metadata.get(REQUEST_ID_KEY))
        current_request_id.set(request_id)
        code = grpc.StatusCode.OK
        if counted:
            self._enter()
        try:
            if counted:
                self._admit(metadata)
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
        except Exception as raised:
            error = _as_penstock_error(raised, request_id)
            code, message = error.code, error.message
            trailers = (*trailers_of(error), (REQUEST_ID_KEY, request_id))
            # The error's traceback has this frame, which has the request: a circle until a garbage collection.
            del error
            await context.abort(code, message, trailers)
        finally:
            if counted:
                self._leave()
            method.handled(code.name).inc()
            method.handling.observe(time.perf_counter() - begin)

    def _enter(self) -> None:
        self._in_flight += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()

    def _admit(self, metadata: dict[str, str | bytes]) -> None:
        if self._tokens is not None and not self._tokens.accepts(metadata.get("authorization")):
            raise Unauthenticated("a valid bearer token is required", reason="UNAUTHENTICATED")
        if self._in_flight > self._max_concurrent_rpcs:
            raise ResourceExhausted(
                "too many calls in flight", reason="TOO_MANY_RPCS", retry_after_seconds=OVERLOAD_RETRY_SECONDS
            )


def behavior_of(handler: Handler) -> Behavior:
    """Return the function of a handler of any kind."""
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return cast("Behavior", next(kind for kind in kinds if kind is not None))


def handler_like(handler: Handler, behavior: Behavior, deserializer: Callable[[bytes], Any] | None) -> Handler:
    """Make a handler of the same kind, with the same serializer."""
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    made: Handler = make(behavior, request_deserializer=deserializer, response_serializer=handler.response_serializer)
    return made


def _lenient(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserializer is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return _MALFORMED

    return parse


async def _answer_once(behavior: Behavior, request: Any, context: Context) -> Any:
    if request is _MALFORMED:
        raise DecodeError
    return await behavior(request, context)


async def _answer_stream(behavior: Behavior, request: Any, context: Context) -> None:
    if request is _MALFORMED:
        raise DecodeError
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
