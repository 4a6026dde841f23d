"""Server of grpc.aio behind the seam of serving.transport."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, ClassVar, NoReturn, cast

import grpc

from penstock.common.addresses import join_address
from penstock.common.config import ServerConfig
from penstock.common.credentials import server_credentials
from penstock.common.errors import CODE_BY_NUMBER, PenstockError
from penstock.http2.metadata import Metadata
from penstock.http2.server import PROBE_MESSAGE_BYTES
from penstock.http2.unfinished_requests import came_too_slowly
from penstock.serving.grpc_accepting import make_server
from penstock.serving.grpc_options import server_options
from penstock.serving.grpc_probes import GrpcProbes
from penstock.serving.grpc_wakeups import wakeups_together
from penstock.serving.interceptors import Admit, Handler, Wrap, behavior_of, handler_like, refusal_trailers

_END: Any = cast("Any", grpc.aio).EOF  # its type stubs do not know it


class GrpcServer:
    """Server of grpc.aio. Belongs to one event loop."""

    def __init__(
        self, config: ServerConfig, *, max_calls: int, wrap: Wrap, shares_port: bool, admit: Admit | None = None
    ) -> None:
        """Make it. More than `max_calls` at once are refused. `wrap` and `admit` as in Http2Server."""
        self._config = config
        with wakeups_together():
            self._inner = make_server(
                (_Adapter(config, wrap, admit),), server_options(config, shares_port=shares_port), max_calls
            )

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Generated code calls it."""
        self._inner.add_generic_rpc_handlers(tuple(handlers))

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """Generated code calls it."""
        inner: Any = self._inner  # its type stubs do not know it
        inner.add_registered_method_handlers(service_name, dict(method_handlers))

    async def open_port(self) -> int:
        """Open the port and return it. Raises OSError without a reason, and StartupError naming a file's flag."""
        where = join_address(self._config.host, self._config.port)
        credentials = server_credentials(self._config)
        try:
            if credentials is None:
                port = self._inner.add_insecure_port(where)
            else:
                port = self._inner.add_secure_port(where, credentials)
        except RuntimeError as error:
            raise OSError(f"grpc cannot listen on {where}") from error
        if port == 0:
            raise OSError(f"grpc cannot listen on {where}")
        return port

    async def start(self) -> None:
        """Accept connections."""
        await self._inner.start()

    async def stop(self, grace: float | None) -> None:
        """Take no new calls, give live ones `grace` seconds, cancel the rest, hang up."""
        await self._inner.stop(grace)


class GrpcServerCall:
    """A ServicerContext with the methods of the seam's ServerCall; its own methods are bound once, to cost no more."""

    writes_at_once: ClassVar[bool] = False

    __slots__ = (
        "_context",
        "_over",
        "_status",
        "_task",
        "has_ended",
        "invocation_metadata",
        "probes",
        "read",
        "set_code",
        "set_details",
        "set_trailing_metadata",
        "time_remaining",
        "write",
    )

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._task = asyncio.current_task()
        self._over: list[Callable[[], None]] = []
        # Task that sends the status of a call that was cut off.
        self._status: asyncio.Task[None] | None = None
        # Its handler has set its status, and is to return.
        self.has_ended = False
        self.read: Callable[[], Awaitable[Any]] = context.read
        self.invocation_metadata: Callable[[], Metadata] = context.invocation_metadata  # type: ignore[assignment]
        self.time_remaining: Callable[[], float | None] = context.time_remaining
        self.set_trailing_metadata: Callable[[Metadata], None] = context.set_trailing_metadata
        self.set_code: Callable[[grpc.StatusCode], None] = context.set_code
        self.set_details: Callable[[str], None] = context.set_details
        self.write: Callable[[Any], Awaitable[None]] = context.write
        # Those that it is one of, if it has shown no credentials.
        self.probes: GrpcProbes | None = None

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the handler has ended, which a reset cancels."""
        # grpc.aio's own callbacks hold the call that holds them.
        self._over.append(callback)

    def end(self) -> None:
        """Call what waits for the end of the handler."""
        for callback in self._over:
            callback()

    def code(self) -> grpc.StatusCode:
        """Return the status that the handler has set; OK when it has set none."""
        code: Any = self._context.code()
        # grpc.aio returns the status as a number.
        return code if isinstance(code, grpc.StatusCode) else CODE_BY_NUMBER.get(code, grpc.StatusCode.OK)

    def details(self) -> str:
        """Return the status's explanation."""
        return str(self._context.details() or "")

    def vouch(self) -> None:
        """Note that its handler has found its credentials good: it is a probe no more."""
        if self.probes is not None:
            self.probes.discard(self)

    def try_write(self, message: Any) -> bool:
        """Return False: grpc.aio writes only in a task."""
        return False

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call. Always raises grpc.aio.AbortError."""
        if asyncio.current_task() is not self._task:
            # The handler's task may be stuck in a write.
            await self._context.abort(code, details, trailing_metadata)
        # grpc.aio's own keeps its error, and so the frames of the whole call: a cycle for the garbage collector, 28
        # objects a call. Its handler ends with this status once it returns; until then it is over for all the same.
        if not self.has_ended:
            self.set_code(code)
            self.set_details(details)
            if trailing_metadata:
                self.set_trailing_metadata(trailing_metadata)
            self.has_ended = True
            self.write = _refuse_write
        raise grpc.aio.AbortError

    def cut_off(self, code: grpc.StatusCode, details: str) -> None:
        """End it with a status, and its handler, whatever it waits for."""
        self._status = asyncio.ensure_future(self._send_status(code, details))
        if self._task is not None:
            # Behind the status's first step: grpc.aio sends none for a handler that was cancelled.
            asyncio.get_running_loop().call_soon(self._task.cancel)

    async def _send_status(self, code: grpc.StatusCode, details: str) -> None:
        # InternalError: the call is over.
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.InternalError):
            await self._context.abort(code, details)


async def _refuse_write(message: Any) -> None:
    """Stand-in for `write` of a call that was aborted: as grpc.aio's own does then."""
    raise grpc.aio.AbortError


class _Requests:
    """Messages of a stream of requests.

    grpc's own iterator is a generator: where a handler leaves it before its end, it waits for the garbage collector
    with the whole call, and is then closed by a task of its own.
    """

    def __init__(self, call: GrpcServerCall) -> None:
        self._read = call.read

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        message = await self._read()
        if message is _END:
            raise StopAsyncIteration
        return message


class _Adapter(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stub only
    """Interceptor that wraps handlers and gives them a GrpcServerCall.

    For grpc every method takes a stream of bytes: otherwise it would read and parse a request before Penstock's code
    has seen the call's token, and wait for it for ever.
    """

    def __init__(self, config: ServerConfig, wrap: Wrap, admit: Admit | None) -> None:
        self._config = config
        self._wrap = wrap
        self._admit = admit
        # Wrapped handlers by method; only methods that exist.
        self._handlers: dict[str, Handler] = {}
        # Calls that need no credentials.
        self._probes = GrpcProbes(config.anonymous_rpcs, config.anonymous_rpcs_each)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        name = handler_call_details.method
        known = self._handlers.get(name)
        if known is None:
            inner: Handler | None = await continuation(handler_call_details)
            if inner is None:
                return inner  # type: ignore[return-value]  # UNIMPLEMENTED
            known = self._handlers[name] = self._adapted(name, self._wrap(name, inner))
        return known

    def _adapted(self, name: str, handler: Handler) -> Handler:
        behavior, parse = behavior_of(handler), handler.request_deserializer
        is_stream = handler.request_streaming

        async def handle(_: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            call = GrpcServerCall(context)
            try:
                return await admitted(context, call)
            except Exception:
                # What a handler raises on its way out of an abort does not replace its status.
                if not call.has_ended:
                    raise
                return None
            finally:
                call.end()

        async def admitted(context: grpc.aio.ServicerContext[Any, Any], call: GrpcServerCall) -> Any:
            metadata = call.invocation_metadata() or ()
            try:
                is_trusted = self._admit is None or self._admit(name, metadata)
            except PenstockError as error:
                await call.abort(error.code, error.message, refusal_trailers(error, metadata))
            if is_trusted:
                return await behavior(_Requests(call) if is_stream else await self._request(call, parse), call)
            if not self._probes.add(call, context.peer()):
                await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls without credentials")
            call.probes = self._probes
            try:
                request = _Requests(call) if is_stream else await self._request(call, parse, PROBE_MESSAGE_BYTES)
                return await behavior(request, call)
            finally:
                self._probes.discard(call)

        return handler_like(handler, handle, parse if is_stream else None, takes_stream=True)

    async def _request(
        self, call: GrpcServerCall, parse: Callable[[bytes], Any] | None, most_bytes: int | None = None
    ) -> Any:
        """Return the only message of a unary request, of at most `most_bytes`."""
        most = self._config.request_seconds
        try:
            async with asyncio.timeout(most):
                data = await call.read()
        except TimeoutError:
            await call.abort(grpc.StatusCode.DEADLINE_EXCEEDED, came_too_slowly(most))
        if data is _END:
            await call.abort(grpc.StatusCode.INTERNAL, "a unary request is exactly one message")
        if most_bytes is not None and len(data) > most_bytes:
            # grpc has one bound for all methods.
            details = f"Received message larger than max ({len(data)} vs. {most_bytes})"
            await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        return parse(data) if parse is not None else data
