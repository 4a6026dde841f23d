"""The listener's bounds on handshakes."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from asyncio import sslproto

import pytest
from factories.servers.router import until
from penstock.http2.listener import Listener

HERE, THERE = "127.0.0.1", "127.0.0.2"


async def test_handshakes_of_one_network_push_out_their_own() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (listener,), port = await Listener.bind(HERE, 0, asyncio.Protocol, tls, 60.0, 6, most_handshakes_each=3)
    listener.start()
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        for source in (HERE, HERE, THERE, THERE, THERE, THERE, THERE):
            opened.append(await asyncio.open_connection(HERE, port, local_addr=(source, 0)))
            await until(lambda: len(listener._opening) == min(len(opened), 5))
        await until(lambda: all(opened[number][0].at_eof() for number in (2, 3)))
        assert not any(opened[number][0].at_eof() for number in (0, 1, 4, 5, 6))
        # In all it is the oldest that goes, whoever has it.
        more = ("127.0.0.3", "127.0.0.4")
        opened += [await asyncio.open_connection(HERE, port, local_addr=(source, 0)) for source in more]
        await until(lambda: opened[0][0].at_eof())
        assert not opened[1][0].at_eof()
    finally:
        listener.close()
        for _, writer in opened:
            writer.transport.abort()
        await until(lambda: not listener._opening and not listener._opening_of)


async def test_a_connection_without_tls_needs_no_task() -> None:
    made: list[asyncio.Protocol] = []

    def protocol() -> asyncio.Protocol:
        made.append(asyncio.Protocol())
        return made[-1]

    (listener,), port = await Listener.bind(HERE, 0, protocol, None, 60.0, 6)
    tasks = asyncio.all_tasks()
    listener.start()
    opened = [await asyncio.open_connection(HERE, port) for _ in range(20)]
    try:
        await until(lambda: len(made) == len(opened))
        assert asyncio.all_tasks() == tasks
    finally:
        listener.close()
        for _, writer in opened:
            writer.transport.abort()


async def test_a_handshake_needs_no_task() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (listener,), port = await Listener.bind(HERE, 0, asyncio.Protocol, tls, 60.0, 64)
    tasks = asyncio.all_tasks()
    listener.start()
    opened = [await asyncio.open_connection(HERE, port) for _ in range(20)]
    try:
        await until(lambda: len(listener._opening) == len(opened))
        assert asyncio.all_tasks() == tasks
    finally:
        listener.close()
        for _, writer in opened:
            writer.transport.abort()
        await until(lambda: not listener._opening)


async def test_protocols_that_begin_at_once_know_their_connection_in_the_turn_that_accepts_it() -> None:
    told: list[int] = []
    turns = 0

    class Told(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            told.append(turns)

    (listener,), port = await Listener.bind(HERE, 0, Told, None, 60.0, 64, begins_at_once=True)
    listener.start()
    caller = socket.create_connection((HERE, port))
    try:
        while not told:
            turns += 1
            await asyncio.sleep(0)
        accepted = turns
        while len(told) < 2:
            turns += 1
            await asyncio.sleep(0)
        # asyncio tells it again.
        assert told == [accepted, accepted + 1]
    finally:
        listener.close()
        caller.close()


@pytest.mark.parametrize("sent", [b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"], ids=["half a record", "no TLS"])
async def test_a_failed_handshake_is_free_without_a_garbage_collection(sent: bytes) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (listener,), port = await Listener.bind(HERE, 0, asyncio.Protocol, tls, 60.0, 64)
    listener.start()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            reader, writer = await asyncio.open_connection(HERE, port)
            writer.write(sent)
            writer.write_eof()
            await reader.read()
            writer.close()
        await until(lambda: not listener._opening)
        # It has the buffers. (asyncio's own transport waits for a collection; it is a kilobyte.)
        await until(lambda: not any(isinstance(one, sslproto.SSLProtocol) for one in gc.get_objects()))
    finally:
        gc.enable()
        listener.close()
