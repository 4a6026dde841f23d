"""Servers of grpc.aio that have asked for calls before they come: by itself one asks for a call after another.

grpcio is asked for a call, a task waits for it, and another asks for the next: about five turns of the event loop a
call. Behind a pause a crowd of calls then waits for some hundred turns. Here some calls are asked for at a time.

This file alone knows grpcio's inner classes. Where a later grpcio has others, its own server accepts as it does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc
from grpc import aio

# Calls of one method that are asked for at a time.
_CALLS_AHEAD = 32
# Turns of the event loop that a stop gives to those that have come: several for each.
_MOST_TURNS = 16 * _CALLS_AHEAD

try:
    from grpc._cython import cygrpc
    from grpc.aio import _server

    _InnerServer: Any = cast("Any", cygrpc).AioServer
    _Server: Any = cast("Any", _server).Server
except (ImportError, AttributeError):
    _InnerServer = _Server = object


def make_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],  # type: ignore[type-arg]  # generic in its stub only
    options: Sequence[tuple[str, int | str]],
    max_calls: int,
) -> grpc.aio.Server:
    """Make a server. It refuses more than `max_calls` at once."""
    try:
        server: grpc.aio.Server = _AskingServer(tuple(interceptors), tuple(options), max_calls)
    except (AttributeError, TypeError):
        server = aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=max_calls)
    return server


class CallLine:
    """Calls of one method that were asked for, and those that came and are not taken yet. Belongs to one event loop."""

    def __init__(self, ask: Callable[[], asyncio.Future[Any]]) -> None:
        """Make it. `ask` asks for one more call, and returns the future of it."""
        self._ask = ask
        self._asked: set[asyncio.Future[Any]] = set()
        self._here: deque[Any] = deque()
        self._waiting: asyncio.Future[Any] | None = None
        self._ahead, self._is_over = _CALLS_AHEAD, False

    @property
    def has_calls(self) -> bool:
        """True while calls have come that are not taken."""
        return bool(self._here)

    def close(self) -> None:
        """Ask no more ahead."""
        # One question stays: its error tells grpcio's loop of the stop.
        self._ahead = 1

    def end(self) -> None:
        """Let go of calls that nobody takes any more: while one is held, the server has not stopped."""
        self._is_over = True
        self._here.clear()

    def next(self) -> asyncio.Future[Any]:
        """Return a future of the next call. Only one may wait at a time."""
        while len(self._asked) + len(self._here) < self._ahead:
            asked = self._ask()
            self._asked.add(asked)
            asked.add_done_callback(self._came)
        future = asyncio.get_running_loop().create_future()
        if self._here:
            future.set_result(self._here.popleft())
        else:
            self._waiting = future
        return future

    def _came(self, asked: asyncio.Future[Any]) -> None:
        self._asked.discard(asked)
        # All end with an error when the server stops.
        error = None if asked.cancelled() else asked.exception()
        waiting = self._waiting
        if waiting is None or waiting.done():
            if error is None and not asked.cancelled() and not self._is_over:
                self._here.append(asked.result())
            return
        self._waiting = None
        if asked.cancelled():
            waiting.cancel()
        elif error is not None:
            waiting.set_exception(error)
        else:
            waiting.set_result(asked.result())


class _Accepting(_InnerServer):  # type: ignore[misc]
    """grpcio's inner server, with a line of calls for each registered method and one for all others."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lines: dict[bytes | None, CallLine] = {}

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        line = self._lines.get(method)
        if line is None:
            ask = super()._make_request_call_future
            line = self._lines[method] = CallLine(lambda: ask(method))
        return line.next()

    async def take_all(self) -> None:
        """Return once the calls that have come are taken: their handlers answer them. No more come ahead."""
        lines = list(self._lines.values())
        for line in lines:
            line.close()
        for _ in range(_MOST_TURNS):
            if not any(line.has_calls for line in lines):
                break
            await asyncio.sleep(0)
        for line in lines:
            line.end()


class _AskingServer(_Server):  # type: ignore[misc]
    """grpc.aio's server around the inner one above."""

    def __init__(self, interceptors: tuple[Any, ...], options: tuple[Any, ...], max_calls: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = _Accepting(self._loop, None, (), interceptors, options, max_calls)

    async def stop(self, grace: float | None) -> None:
        """As grpc.aio's, once the calls that have come are taken."""
        await self._server.take_all()
        await super().stop(grace)
