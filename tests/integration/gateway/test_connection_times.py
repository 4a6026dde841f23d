"""Every state of a connection has an end, whatever the caller sends meanwhile: no state is held by dripping bytes.

docs/guide/reliability.md lists the states with the flag that bounds each.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from factories.servers.emitting_backend import count_up
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.gateway_tree import CA, TLS_FILES
from factories.servers.http_connection import Connection
from factories.servers.router import backend, running_router, until

# Flags that end a state, short enough to wait for; the one of a test is shorter than the others are.
LONG, SHORT = 600.0, 0.5
SECONDS = ("header_seconds", "body_seconds", "idle_seconds", "stalled_reader_seconds")
# Between two bytes of a slow sender: before each flag's end.
DRIP_SECONDS = 0.1
# An ended connection is gone by then, on a machine that is busy.
PATIENCE_SECONDS = 60.0
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
WITH_BODY = b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
POST = b"POST %b HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: 1000\r\n\r\n"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
# Record and begin of a ClientHello.
HALF_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
TLS: dict[str, Any] = {"tls_cert": str(TLS_FILES / "server.pem"), "tls_key": str(TLS_FILES / "server.key")}


@asynccontextmanager
async def served(ends_by: str, **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway of which one limit of time is short: what ends soon was ended by that one."""
    times = {name: (max(1.0, SHORT) if name == "idle_seconds" else SHORT) for name in SECONDS if name == ends_by}
    async with (
        backend(script=count_up(20), step_seconds=0.02) as one,
        running_router(one) as router,
        running_gateway(router.server.address, **{**dict.fromkeys(SECONDS, LONG), **times, **settings}) as gateway,
    ):
        yield gateway


async def answered(connection: Connection, data: bytes) -> None:
    """Send a request, and read its answer: one of /health."""
    connection.writer.write(data)
    assert await connection.status() == 200
    await connection.reader.readuntil(b"}")


async def nothing(connection: Connection) -> None:
    """Send nothing."""


async def half_a_head(connection: Connection) -> None:
    connection.writer.write(b"GET /")


async def an_answer(connection: Connection) -> None:
    await answered(connection, HEALTH)


async def an_upgrade(connection: Connection) -> None:
    await answered(connection, HEALTH[:-2] + b"connection: Upgrade\r\nupgrade: websocket\r\n\r\n")


async def half_a_head_behind_an_answer(connection: Connection) -> None:
    await answered(connection, HEALTH)
    connection.writer.write(b"GET /")


async def half_a_head_with_a_request(connection: Connection) -> None:
    """One piece has a request and the begin of the next."""
    await answered(connection, HEALTH + b"GET /")


async def half_a_head_behind_requests(connection: Connection) -> None:
    await answered(connection, HEALTH * 3 + b"GET /")


async def half_a_head_during_a_stream(connection: Connection) -> None:
    connection.post("/v1/chat/completions", {"messages": HELLO, "stream": True})
    assert await connection.status() == 200
    connection.writer.write(b"GET /")
    while b"[DONE]" not in await connection.reader.readline():
        pass


async def half_a_body(connection: Connection) -> None:
    connection.writer.write(POST % (b"/v1/chat/completions", b""))


async def half_a_body_that_is_dropped(connection: Connection) -> None:
    connection.writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")


async def half_a_body_that_has_its_answer(connection: Connection) -> None:
    await answered(connection, WITH_BODY % 1000)


async def a_body_behind_its_answer(connection: Connection) -> None:
    await answered(connection, WITH_BODY % 5)
    connection.writer.write(b"12345")


async def a_head_behind_such_a_body(connection: Connection) -> None:
    await answered(connection, WITH_BODY % 5)
    connection.writer.write(b"12345GET /")


async def a_body_that_is_refused(connection: Connection) -> None:
    connection.writer.write(POST % (b"/v1/nothing", b""))
    assert await connection.status() == 404


async def a_refused_head(connection: Connection) -> None:
    connection.writer.write(b"nonsense\r\n\r\n")
    assert await connection.status() == 400


# State -> the flag that ends it (an own time where it is ""), the way into it, and what drips then.
Way = Callable[[Connection], Awaitable[None]]
STATES: dict[str, tuple[str, Way, bytes]] = {
    "nothing yet": ("header_seconds", nothing, b""),
    "half a head": ("header_seconds", half_a_head, b"a"),
    "empty lines before a head": ("header_seconds", nothing, b"\r\n"),
    "idle": ("idle_seconds", an_answer, b""),
    "empty lines behind an answer": ("idle_seconds", an_answer, b"\r\n"),
    "an upgrade that is ignored": ("idle_seconds", an_upgrade, b""),
    "half a head behind an answer": ("header_seconds", half_a_head_behind_an_answer, b"a"),
    "half a head that came with a request": ("header_seconds", half_a_head_with_a_request, b"a"),
    "half a head behind requests": ("header_seconds", half_a_head_behind_requests, b"a"),
    "half a head that came during a stream": ("header_seconds", half_a_head_during_a_stream, b"a"),
    "the same, silent": ("header_seconds", half_a_head_during_a_stream, b""),
    "half a body": ("body_seconds", half_a_body, b"a"),
    "half a body that is dropped": ("body_seconds", half_a_body_that_is_dropped, b"a"),
    "half a body that has its answer": ("body_seconds", half_a_body_that_has_its_answer, b"a"),
    "the same body, silent": ("body_seconds", half_a_body_that_has_its_answer, b""),
    "idle behind such a body": ("idle_seconds", a_body_behind_its_answer, b""),
    "half a head behind such a body": ("header_seconds", a_head_behind_such_a_body, b"a"),
    "half a body that is refused": ("body_seconds", a_body_that_is_refused, b"a"),
    "a refused head": ("", a_refused_head, b"a"),
}


async def _drip(writer: asyncio.StreamWriter, piece: bytes) -> None:
    while piece:
        writer.write(piece)
        await asyncio.sleep(DRIP_SECONDS)


@pytest.mark.parametrize("state", STATES)
async def test_a_state_ends_though_bytes_drip(state: str) -> None:
    ends_by, enter, piece = STATES[state]
    async with served(ends_by) as gateway:
        connection = await Connection.to(gateway)
        await enter(connection)
        dripping = asyncio.create_task(_drip(connection.writer, piece))
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await connection.until_closed()
        finally:
            dripping.cancel()
            connection.close()
        await until(lambda: gateway.metric("http_connections") == 0)


@pytest.mark.parametrize("state", [state for state, row in STATES.items() if row[0] != "body_seconds"])
async def test_over_tls_too(state: str) -> None:
    ends_by, enter, piece = STATES[state]
    async with served(ends_by, **TLS) as gateway:
        context = ssl.create_default_context(cafile=CA)
        connection = Connection(
            *await asyncio.open_connection(*gateway.host_port, ssl=context, server_hostname="localhost")
        )
        await enter(connection)
        dripping = asyncio.create_task(_drip(connection.writer, piece))
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await connection.until_closed()
        finally:
            dripping.cancel()
            connection.close()
        await until(lambda: gateway.metric("http_connections") == 0)


@pytest.mark.parametrize("begin", [b"", HALF_HELLO], ids=["silent", "half a hello"])
async def test_a_handshake_ends(begin: bytes) -> None:
    async with served("header_seconds", **TLS) as gateway:
        connection = await Connection.to(gateway)
        connection.writer.write(begin)
        dripping = asyncio.create_task(_drip(connection.writer, begin and b"\0"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await connection.until_closed() == b""
        dripping.cancel()
        connection.close()


def _small(gateway: Gateway) -> socket.socket:
    """A connection whose end takes little, and reads nothing."""
    end = socket.socket()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    end.connect(gateway.host_port)
    return end


def _unsent(gateway: Gateway) -> int:
    return sum(one._own.get_write_buffer_size() for one in gateway.app._server._state.connections)


async def _fill(gateway: Gateway, end: socket.socket) -> None:
    """Ask until some of an answer cannot be sent, but less than makes the gateway stop writing."""
    (connection,) = gateway.app._server._state.connections
    state = connection.server_state
    while not _unsent(gateway):
        wanted = state.total_requests + 8
        end.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n" * 8)
        await until(lambda: state.total_requests >= wanted)  # noqa: B023
    assert not connection.flow.write_paused


@pytest.mark.parametrize("then", ["silence", "an end", "the last request"])
async def test_an_answer_that_nobody_takes_ends(then: str) -> None:
    """Few bytes are left in the process: nothing writes, so nothing notes that nobody reads."""
    settings = {"idle_seconds": 5.0, "stalled_reader_seconds": SHORT, "max_unsent_bytes": 4096}
    async with served("", **settings) as gateway:
        end = _small(gateway)
        await until(lambda: gateway.metric("http_connections") == 1)
        await _fill(gateway, end)
        if then == "an end":
            end.shutdown(socket.SHUT_WR)
        elif then == "the last request":
            end.sendall(HEALTH[:-2] + b"connection: close\r\n\r\n")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await until(lambda: gateway.metric("http_connections") == 0)
        end.close()


async def test_an_end_behind_a_refusal_gives_no_more_time() -> None:
    async with served("", max_unsent_bytes=4096) as gateway:
        end = _small(gateway)
        await until(lambda: gateway.metric("http_connections") == 1)
        await _fill(gateway, end)
        end.sendall(b"nonsense\r\n\r\n")
        (connection,) = gateway.app._server._state.connections
        await until(lambda: connection.is_closing)
        end.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await until(lambda: gateway.metric("http_connections") == 0)
        end.close()


async def test_what_follows_an_answer_has_the_bound_of_a_body() -> None:
    async with served("", max_body_bytes=64 << 10) as gateway:
        connection = await Connection.to(gateway)
        await answered(connection, WITH_BODY % (1 << 40))
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 64 << 20:
                connection.writer.write(b"x" * (16 << 10))
                await connection.writer.drain()
                sent += 16 << 10
        # Its sockets take some.
        assert sent < 16 << 20
        connection.close()
        await until(lambda: gateway.metric("http_connections") == 0)
