"""Probes of a gateway: on every kind of connection, and how many turns of the event loop one waits for."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.http_connection import Connection
from factories.servers.router import backend, running_router

HOST = b"host: localhost\r\n"
PATHS = (b"/health", b"/healthz", b"/readyz")


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """One before a router with a backend."""
    async with backend() as one, running_router(one) as router, running_gateway(router.server.address) as ready:
        yield ready


async def test_probes_behind_one_another_have_their_answers_in_order(gateway: Gateway) -> None:
    connection = await Connection.to(gateway)
    asked = [b"GET %b HTTP/1.1\r\n%b\r\n" % (path, HOST) for path in PATHS * 4]
    asked.insert(5, b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n")
    asked.append(b"GET /health HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n")
    connection.writer.write(b"".join(asked))
    answers = await connection.until_closed()
    bodies = [part.split(b"HTTP/1.1")[0] for part in answers.split(b"\r\n\r\n")[1:]]
    assert [b"version" in body for body in bodies] == [number == 5 for number in range(len(asked))]
    assert all(json.loads(body) == {"status": "ok"} for number, body in enumerate(bodies) if number != 5)
    assert answers.count(b"connection: close") == 1
    connection.close()


@pytest.mark.parametrize("path", PATHS)
async def test_a_probe_as_old_clients_and_load_balancers_send_it(gateway: Gateway, path: bytes) -> None:
    for head, has_body in (
        (b"GET %b HTTP/1.0\r\n\r\n" % path, True),
        (b"HEAD %b HTTP/1.1\r\n%bconnection: close\r\n\r\n" % (path, HOST), False),
        (b"GET %b HTTP/1.1\r\n%bconnection: close\r\ncontent-length: 2\r\n\r\n{}" % (path, HOST), True),
        (b"GET %b?x=1 HTTP/1.1\r\n%bexpect: 100-continue\r\nconnection: close\r\n\r\n" % (path, HOST), True),
    ):
        connection = await Connection.to(gateway)
        connection.writer.write(head)
        head, _, body = (await connection.until_closed()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        assert b"content-type: application/json" in head
        assert body == (b'{"status":"ok"}' if has_body else b"")
        connection.close()


async def test_a_probe_that_came_with_its_connection_waits_for_one_turn(gateway: Gateway) -> None:
    """Under load each turn of the event loop is a wait behind others: there were four."""
    host, port = gateway.host_port
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[tuple[int, bytes]] = loop.create_future()
    turns = 0
    caller = socket.create_connection((host, port))
    caller.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
    caller.setblocking(False)

    def turn() -> None:
        nonlocal turns
        turns += 1
        try:
            data = caller.recv(4096)
        except BlockingIOError:
            loop.call_soon(turn)
            return
        answered.set_result((turns, data))

    loop.call_soon(turn)
    taken, data = await asyncio.wait_for(answered, 60)
    caller.close()
    assert data.startswith(b"HTTP/1.1 200")
    # The one that looks first may be in the turn that accepts.
    assert taken <= 2


async def test_a_probe_does_not_wait_for_the_head_behind_it(gateway: Gateway) -> None:
    connections = [await Connection.to(gateway) for _ in range(4)]
    # In one turn of the loop: all but one wait for later turns.
    for connection in connections:
        connection.writer.write((b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n") * 3 + b"GET /version HTT")
    for connection in connections:
        for _ in range(3):
            assert await connection.status() == 200
            await connection.reader.readuntil(b"}")
        connection.writer.write(b"P/1.1\r\n" + HOST + b"\r\n")
        assert await connection.status() == 200
        assert b"version" in await connection.reader.readuntil(b"}")
        connection.close()
