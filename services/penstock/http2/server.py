"""Server of gRPC on asyncio: it finds the handler of each call and runs it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import grpc

from penstock.common.logging import get_logger
from penstock.http2.limits import Limits
from penstock.http2.server_call import Call, Refused
from penstock.http2.server_connection import Connection

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stub only
# Connections that may wait to be accepted; beyond asyncio's 100 they would come a second later.
_BACKLOG = 1024
_log = get_logger("penstock.http2")


class _Details(grpc.HandlerCallDetails):
    """Details by which generic handlers look a method up."""

    def __init__(self, call: Call) -> None:
        self.method = call.method
        self.invocation_metadata = call.invocation_metadata()


class Http2Server:
    """Server for the handlers that generated code adds to a grpc.aio.Server. Belongs to one event loop.

    A handler gets its request, or an async iterator of requests, and its `Call`. It writes to the call itself, or
    returns the only answer. It is a coroutine: `wrap` has to run async generators.
    """

    def __init__(
        self, limits: Limits, *, max_calls: int, wrap: Callable[[str, Handler], Handler] | None = None
    ) -> None:
        """Make it. More than `max_calls` at once are refused with RESOURCE_EXHAUSTED.

        `wrap` is called once for each method that is used, with its name ("/package.Service/Name") and its handler, and
        returns the handler to use.
        """
        self._limits = limits
        self._max_calls = max_calls
        self._wrap = wrap
        self._generic: list[Any] = []
        # Wrapped handlers by method; only methods that exist.
        self._handlers: dict[str, Handler] = {}
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """See grpc.aio.Server."""
        self._generic += handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        """Do nothing: generated code adds every method twice, and the generic handler is enough."""

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None, *, shares_port: bool) -> int:
        """Open the port and return it. Raises OSError."""
        loop, host = asyncio.get_running_loop(), host.strip("[]")
        where: dict[str, Any] = {"host": host, "port": port, "reuse_port": shares_port or None, "backlog": _BACKLOG}
        if host == "::" and socket.has_dualstack_ipv6():
            # With IPv4, as grpc does; asyncio would take IPv6 alone.
            kind: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True}
            where = {"sock": socket.create_server((host, port), reuse_port=shares_port, **kind), "backlog": _BACKLOG}
        self._server = await loop.create_server(self._make_connection, ssl=tls, start_serving=False, **where)
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Accept connections."""
        if self._server is not None:
            await self._server.start_serving()

    async def stop(self, grace: float | None) -> None:
        """Take no new calls, give live ones `grace` seconds, cancel the rest, hang up."""
        if self._server is not None:
            self._server.close()
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

    def _make_connection(self) -> Connection:
        return Connection(self._limits, self._on_call, self._connections.add, self._connections.discard)

    def _on_call(self, call: Call) -> None:
        if len(self._tasks) >= self._max_calls:
            call.finish(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
            return
        call.task = asyncio.get_running_loop().create_task(self._serve(call))
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)

    async def _serve(self, call: Call) -> None:
        try:
            await self._handle(call)
        except asyncio.CancelledError:
            call.finish(grpc.StatusCode.CANCELLED, "")
        except grpc.aio.AbortError:
            pass
        except Refused as refused:
            call.finish(refused.code, refused.details)
        except grpc.aio.InternalError:
            call.finish(grpc.StatusCode.INTERNAL, "")
        except Exception:
            _log.exception("handler failed", method=call.method)
            call.finish(grpc.StatusCode.UNKNOWN, "")

    async def _handle(self, call: Call) -> None:
        handler: Any = self._handlers.get(call.method) or self._find(call)
        call.serializer = handler.response_serializer
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if handler.request_streaming:
            request: Any = call.requests(handler.request_deserializer)
        else:
            data = await call.request()
            request = handler.request_deserializer(data) if handler.request_deserializer is not None else data
        answer = await behavior(request, call)
        if not handler.response_streaming:
            await call.write(answer)
        call.finish(call.code(), call.details())

    def _find(self, call: Call) -> Handler:
        """Find the handler of a method that is called for the first time. Raises Refused when there is none."""
        details = _Details(call)
        found = (generic.service(details) for generic in self._generic)
        handler: Handler | None = next((one for one in found if one is not None), None)
        if handler is None:
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if self._wrap is not None:
            handler = self._wrap(call.method, handler)
        self._handlers[call.method] = handler
        return handler
