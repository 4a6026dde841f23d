"""Server of gRPC on asyncio: it finds the handler of each call and runs it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import grpc

from penstock.common.logging import get_logger
from penstock.http2.limits import Limits, ServerLimits
from penstock.http2.listener import Listener
from penstock.http2.metadata import Metadata
from penstock.http2.request_bytes import RequestBytes
from penstock.http2.server_call import Call, Refused
from penstock.http2.server_connection import Connection
from penstock.http2.strangers import Strangers

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stub only
# (method's name, metadata of the call) -> True when the call was admitted by its credentials (or if none are required),
# False when it needs none. Raises Refused.
Admit = Callable[[str, Metadata], bool]
# Largest message of a call that needs no credentials, and its work in seconds.
PROBE_MESSAGE_BYTES, _PROBE_SECONDS = 4096, 0.0003
# Seconds for connections to send their last bytes after the server stopped.
_LINGER_SECONDS = 0.5
_log = get_logger("penstock.http2")


class _Details(grpc.HandlerCallDetails):
    """Details with which generic handlers look up a method."""

    def __init__(self, call: Call) -> None:
        self.method = call.method
        self.invocation_metadata = call.invocation_metadata()


class Http2Server:
    """Server for the handlers that generated code adds to a grpc.aio.Server. Belongs to one event loop.

    A handler gets its request, or an async iterator of requests, and its `Call`. It writes to the call itself, or
    returns the only answer. It is a coroutine: `wrap` must run async generators.
    """

    def __init__(
        self,
        limits: Limits,
        server_limits: ServerLimits,
        *,
        wrap: Callable[[str, Handler], Handler] | None = None,
        admit: Admit | None = None,
    ) -> None:
        """Make it. Calls beyond those of `server_limits` are refused with RESOURCE_EXHAUSTED.

        `wrap` is called once for each method that is used, with its name ("/package.Service/Name") and its handler, and
        returns the handler to use. `admit` is called for each call of an existing method, before its request arrives;
        without it every call is admitted.
        """
        self._limits = limits
        self._server_limits = server_limits
        self._wrap = wrap
        self._admit = admit
        self._request_bytes = RequestBytes(server_limits.request_bytes)
        self._strangers = Strangers(server_limits.max_strangers, server_limits.strangers_share)
        # Calls that need no credentials, the oldest first.
        self._probes: dict[Call, None] = {}
        self._generic: list[Any] = []
        # Wrapped handlers by method; only methods that exist.
        self._handlers: dict[str, Handler] = {}
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        # Calls that are not over; the task of a reset call may take a moment longer.
        self._num_live = 0
        self._listeners: list[Listener] = []
        self._is_stopping = False

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        """Do nothing: generated code adds every method twice, and the generic handler is enough."""

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None, *, shares_port: bool) -> int:
        """Open the port and return it. Raises OSError."""
        # Nobody has shown credentials during a handshake.
        most = self._server_limits.max_strangers
        seconds = self._limits.handshake_seconds
        self._listeners, bound = await Listener.bind(
            host,
            port,
            self._make_connection,
            tls,
            seconds,
            most,
            shares_port=shares_port,
            on_work=self._strangers.charge,
        )
        return bound

    async def start(self) -> None:
        """Accept connections."""
        for listener in self._listeners:
            listener.start()

    async def stop(self, grace: float | None) -> None:
        """Take no new calls, give live ones `grace` seconds, cancel the rest, hang up."""
        self._is_stopping = True
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in self._connections:
            connection.drain()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=grace or 0)
        for connection in list(self._connections):
            for call in list(connection.calls.values()):
                call.finish(grpc.StatusCode.UNAVAILABLE, "the server stops")
                call.gone()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        for connection in list(self._connections):
            connection.close()
        # A client that does not read holds up nobody.
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._abort_all)

    def _abort_all(self) -> None:
        for connection in list(self._connections):
            connection.abort()

    def _make_connection(self) -> Connection:
        return Connection(
            self._limits,
            self._on_call,
            self._on_open,
            self._connections.discard,
            request_bytes=self._request_bytes,
            strangers=self._strangers,
        )

    def _on_open(self, connection: Connection) -> None:
        self._connections.add(connection)
        if self._is_stopping:
            # Its handshake began before.
            connection.close()

    def _on_call(self, call: Call) -> None:
        try:
            call.handler = self._handlers.get(call.method) or self._find(call)
            call.awaits_request = not call.handler.request_streaming
            if self._admit is None or self._admit(call.method, call.invocation_metadata()):
                call.trust()
            self._take_place(call)
        except Refused as refused:
            call.refuse(refused)
            return
        if not call.is_probe:
            self._count_live(call)
        call.task = asyncio.get_running_loop().create_task(self._serve(call))
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)
        if call.is_probe:
            # Not in the task itself: a task that is cancelled before its first step never runs.
            call.task.add_done_callback(lambda _: self._probes.pop(call, None))

    def _count_live(self, call: Call) -> None:
        self._num_live += 1
        call.when_over(self._forget_call)

    def _take_in(self, call: Call) -> None:
        """Make a probe one of the live calls: its handler vouches for it. It was counted once, so it is not refused."""
        self._probes.pop(call, None)
        self._count_live(call)

    def _take_place(self, call: Call) -> None:
        """Count a call. Raises Refused when there are too many."""
        if call.is_of_a_stranger:
            call.become_probe(PROBE_MESSAGE_BYTES, _PROBE_SECONDS, self._take_in)
            self._probes[call] = None
            if len(self._probes) > self._server_limits.max_probes:
                # The oldest goes: a health check is always answered, however many clients watch.
                oldest = next(iter(self._probes))
                del self._probes[oldest]
                oldest.finish(grpc.StatusCode.RESOURCE_EXHAUSTED, "newer calls without credentials take its place")
                oldest.gone()
        elif self._num_live >= self._server_limits.max_calls:
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")

    def _forget_call(self) -> None:
        self._num_live -= 1

    async def _serve(self, call: Call) -> None:
        try:
            await self._handle(call)
        except asyncio.CancelledError:
            call.finish(grpc.StatusCode.CANCELLED, "")
        except grpc.aio.AbortError:
            pass
        except Refused as refused:
            call.refuse(refused)
        except grpc.aio.InternalError:
            call.finish(grpc.StatusCode.INTERNAL, "")
        except Exception:
            _log.exception("handler failed", method=call.method)
            call.finish(grpc.StatusCode.UNKNOWN, "")

    async def _handle(self, call: Call) -> None:
        handler: Any = call.handler
        call.serializer = handler.response_serializer
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if handler.request_streaming:
            request: Any = call.requests(handler.request_deserializer)
        else:
            # Its bytes, perhaps megabytes, must not be kept beside it for the life of a stream.
            request = await call.request()
            if handler.request_deserializer is not None:
                request = handler.request_deserializer(request)
        answer = await behavior(request, call)
        if not handler.response_streaming:
            await call.write(answer)
        call.finish(call.code(), call.details())

    def _find(self, call: Call) -> Handler:
        """Find the handler of a method on its first call. Raises Refused when there is none."""
        details = _Details(call)
        found = (generic.service(details) for generic in self._generic)
        handler: Handler | None = next((one for one in found if one is not None), None)
        if handler is None:
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if self._wrap is not None:
            handler = self._wrap(call.method, handler)
        self._handlers[call.method] = handler
        return handler
