"""Servers of grpc.aio that have asked for calls before they come, and begin all that have come in one turn.

By itself grpcio begins one call and then waits for the next with asyncio.wait: two turns of the event loop a call, or
more. Where the loop is behind, its turns are long, fewer calls begin in a second than come, and they wait for a hundred
turns although the loop would have the time. Here some calls of each method are asked for at a time, and each begins as
soon as the loop learns of it.

This file alone knows grpcio's inner classes. Where a later grpcio has others, its own server accepts as it does.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import grpc
from grpc import aio

# Calls of one method that are asked for at a time: at first, and where all of these came before the loop looked.
_FEW_AHEAD, _MOST_AHEAD = 2, 32

try:
    from grpc._cython import cygrpc
    from grpc.aio import _server

    _InnerServer: Any = cast("Any", cygrpc).AioServer
    _Server: Any = cast("Any", _server).Server
    # What grpcio's own loop does with a call.
    _handle_rpc: Any = cast("Any", cygrpc)._handle_rpc
    _schedule_rpc: Any = cast("Any", cygrpc)._schedule_rpc_coro
    # Finds a handler by its method's name: generic handlers, and registered ones by name.
    _MethodResolver: Any = cast("Any", cygrpc)._MethodResolver
    _IS_KNOWN = [*inspect.signature(_handle_rpc).parameters, *inspect.signature(_schedule_rpc).parameters] == [
        *("method_name", "method_resolver", "interceptors", "rpc_state", "loop", "concurrency_exceeded"),
        *("rpc_coro", "rpc_state", "loop", "method_name"),
    ]
except (ImportError, AttributeError, ValueError):
    _InnerServer = _Server = object
    _IS_KNOWN = False


def make_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],  # type: ignore[type-arg]  # generic in its stub only
    options: Sequence[tuple[str, int | str]],
    max_calls: int,
) -> grpc.aio.Server:
    """Make a server. It refuses more than `max_calls` at once."""
    if _IS_KNOWN:
        try:
            server: grpc.aio.Server = _AskingServer(tuple(interceptors), tuple(options), max_calls)
        except (AttributeError, TypeError):
            pass
        else:
            return server
    return aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=max_calls)


class CallLine:
    """Calls of one method that were asked for. Belongs to one event loop."""

    def __init__(
        self, ask: Callable[[], asyncio.Future[Any]], begin: Callable[[Any], None], is_open: Callable[[], bool]
    ) -> None:
        """Make it. `ask` asks for one more call, and returns the future of it, which `begin` gets; while `is_open`."""
        self._ask, self._begin, self._is_open = ask, begin, is_open
        self._ahead = _FEW_AHEAD
        # Calls that came in this turn of the loop, and questions without an answer.
        self._num_come = self.num_asked = 0
        self._ask_ahead()

    def _ask_ahead(self) -> None:
        while self.num_asked < self._ahead:
            self.num_asked += 1
            self._ask().add_done_callback(self._came)

    def _came(self, asked: asyncio.Future[Any]) -> None:
        self.num_asked -= 1
        # All end with an error when the server stops.
        has_call = not asked.cancelled() and asked.exception() is None
        if has_call:
            if not self._num_come:
                asyncio.get_running_loop().call_soon(self._next_turn)
            self._num_come += 1
            if self._num_come >= self._ahead:
                self._ahead = min(2 * self._ahead, _MOST_AHEAD)
        if self._is_open():
            self._ask_ahead()
        if has_call:
            self._begin(asked.result())

    def _next_turn(self) -> None:
        self._num_come = 0


class _Accepting(_InnerServer):  # type: ignore[misc]
    """grpcio's inner server, with a line of calls for each method that it knows. Its own loop takes all others."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, interceptors: tuple[Any, ...], options: Any, max_calls: int
    ) -> None:
        super().__init__(loop, None, (), interceptors, options, max_calls)
        self._event_loop, self._interceptors_there, self._max_calls = loop, interceptors, max_calls
        self._known: dict[str, Any] = {}
        self._lines: dict[bytes, CallLine] = {}
        # The event loop itself would not keep them.
        self._calls: set[asyncio.Task[None]] = set()

    def register(self, handlers: Mapping[str, Any]) -> None:
        """Know these methods, by their full names. Call it before the start."""
        more = {name: handler for name, handler in handlers.items() if name not in self._known}
        self._known |= more
        self.add_registered_method_handlers(more)

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        ask = super()._make_request_call_future
        if method is None:
            unknown: asyncio.Future[Any] = ask(None)
            return unknown
        name, resolver = method.decode(), _MethodResolver([], self._known)
        self._lines[method] = CallLine(
            lambda: ask(method), lambda call: self._begin(name, resolver, call), self.is_running
        )
        # grpcio's loop cancels it when the server stops.
        return self._event_loop.create_future()

    def _begin(self, name: str, resolver: Any, call: Any) -> None:
        loop = self._event_loop
        is_too_many = len(self._calls) >= self._max_calls
        handled = _handle_rpc(name, resolver, self._interceptors_there, call, loop, is_too_many)
        task = loop.create_task(_schedule_rpc(handled, call, loop, name))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


class _AskingServer(_Server):  # type: ignore[misc]
    """grpc.aio's server around the inner one above."""

    def __init__(self, interceptors: tuple[Any, ...], options: tuple[Any, ...], max_calls: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = _Accepting(self._loop, interceptors, options, max_calls)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """Generated code calls it. Handlers that tell their methods' names are registered by these."""
        handlers = tuple(generic_rpc_handlers)
        super().add_generic_rpc_handlers(handlers)
        for handler in handlers:
            self._server.register(getattr(handler, "_method_handlers", {}))

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """Generated code calls it, most often beside the other one."""
        self._server.register({f"/{service_name}/{name}": handler for name, handler in method_handlers.items()})
