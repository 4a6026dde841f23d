"""The listener's bounds on handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
from asyncio import sslproto
from pathlib import Path
from typing import Any

import factories.servers.tiny_service
import pytest
from factories.servers.router import until
from penstock.http2 import tls_arrivals
from penstock.http2.handshake_pace import HandshakePace
from penstock.http2.listener import Listener
from penstock.http2.metered_tls import MeteredTls

FILES = Path(factories.servers.tiny_service.__file__).parent / "tls"
HERE, THERE = "127.0.0.1", "127.0.0.2"


async def test_handshakes_of_one_network_push_out_their_own() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (listener,), port = await Listener.bind(HERE, 0, asyncio.Protocol, tls, 60.0, 6, most_handshakes_each=3)
    listener.start()
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        for source in (HERE, HERE, THERE, THERE, THERE, THERE, THERE):
            opened.append(await asyncio.open_connection(HERE, port, local_addr=(source, 0)))
            await until(lambda: listener.num_opening == min(len(opened), 5))
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
        await until(lambda: listener.num_opening == 0)


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
        await until(lambda: listener.num_opening == len(opened))
        assert asyncio.all_tasks() == tasks
    finally:
        listener.close()
        for _, writer in opened:
            writer.transport.abort()
        await until(lambda: listener.num_opening == 0)


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
        await until(lambda: listener.num_opening == 0)
        # It has the buffers. (asyncio's own transport waits for a collection; it is a kilobyte.)
        await until(lambda: not any(isinstance(one, sslproto.SSLProtocol) for one in gc.get_objects()))
    finally:
        gc.enable()
        listener.close()


def _hello() -> bytes:
    """Return the first bytes of a handshake."""
    sent, received = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(received, sent).do_handshake()
    return sent.read()


def _caller(source: str, port: int) -> socket.socket:
    return socket.create_connection((HERE, port), source_address=(source, 0))


async def test_a_flood_of_handshakes_delays_others_by_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake takes a millisecond: sixteen of them were in one turn of the loop, and what came behind waited."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(FILES / "server.pem", FILES / "server.key")
    (listener,), port = await Listener.bind(HERE, 0, asyncio.Protocol, tls, 60.0, 64)
    turn = 0
    # Turns in which handshakes took the first bytes, which is what costs, and the networks of those begun.
    took, begun = list[int](), list[str]()

    class Tls(MeteredTls):
        num_calls = 0

        def do_handshake(self) -> None:
            # asyncio's first call comes before any byte.
            self.num_calls += 1
            if self.num_calls == 2:
                took.append(turn)
            super().do_handshake()

    tls.sslobject_class = Tls
    loop: Any = asyncio.get_running_loop()
    make = loop._make_socket_transport

    def noted(connection: socket.socket, *rest: Any, **named: Any) -> Any:
        begun.append(connection.getpeername()[0])
        return make(connection, *rest, **named)

    monkeypatch.setattr(listener._arrivals, "_make_transport", noted)
    listener.start()
    callers = [_caller(THERE, port) for _ in range(40)]
    callers.append(_caller(HERE, port))
    try:
        await until(lambda: listener.num_opening == len(callers))
        for one in callers:
            one.sendall(_hello())
        while len(took) < len(callers):
            await asyncio.sleep(0)
            turn += 1
        assert max(took.count(one) for one in took) <= 3
        # It comes behind one of the 40.
        assert begun.index(HERE) <= 2
    finally:
        listener.close()
        for one in callers:
            one.close()
        await until(lambda: listener.num_opening == 0)


async def test_a_silent_connection_has_no_tls_and_an_end() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (listener,), port = await Listener.bind(HERE, 0, asyncio.Protocol, tls, 0.3, 64)
    listener.start()
    silent, half = _caller(HERE, port), _caller(HERE, port)
    gc.collect()
    half.sendall(_hello()[:9])
    try:
        await until(lambda: listener.num_opening == 2)
        assert not any(isinstance(one, sslproto.SSLProtocol) for one in gc.get_objects())
        for one in (silent, half):
            one.setblocking(False)
            # A reset where bytes were not read.
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(one, 1), 30) == b""
        await until(lambda: listener.num_opening == 0)
    finally:
        listener.close()
        silent.close()
        half.close()


async def test_a_connection_that_leaves_before_its_first_byte_is_forgotten() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (listener,), port = await Listener.bind(HERE, 0, asyncio.Protocol, tls, 60.0, 64)
    listener.start()
    try:
        left, stays = _caller(HERE, port), _caller(HERE, port)
        await until(lambda: listener.num_opening == 2)
        left.close()
        await until(lambda: listener.num_opening == 1)
    finally:
        listener.close()
        # A listener that closes waits for nobody's first byte.
        assert listener.num_opening == 0
        stays.close()


async def test_a_network_beyond_its_pace_waits_a_while_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_arrivals, "_MOST_HELD_SECONDS", 3600.0)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(FILES / "server.pem", FILES / "server.key")
    now = 0.0
    pace = HandshakePace(0.1, lambda: now)
    (listener,), port = await Listener.bind(HERE, 0, asyncio.Protocol, tls, 60.0, 256, pace=pace)
    listener.start()
    callers = [_caller(THERE, port) for _ in range(200)]
    for one in callers:
        one.sendall(_hello())
    try:
        arrivals = listener._arrivals
        assert arrivals is not None
        await until(lambda: len(arrivals._waiting.get(THERE, ())) > 0 and listener.num_opening == 200)
        await until(lambda: not arrivals._is_turn_taken)
        waiting = list(arrivals._waiting[THERE])
        assert len(waiting) > 50
        other = _caller(HERE, port)
        callers.append(other)
        other.sendall(_hello())
        await until(lambda: any(one.network == HERE and one.transport is not None for one in arrivals._all))
        await until(lambda: not arrivals._is_turn_taken)
        assert list(arrivals._waiting[THERE]) == waiting
        # What the last one's work goes beyond the pace by depends on the machine.
        delay = pace.delay(THERE)
        assert delay > 0
        # Time for one of them, or for a few that open quickly: the pace says 0.01 s for a millisecond.
        now += delay + 0.011
        arrivals._next()
        left = list(arrivals._waiting[THERE])
        begun = len(waiting) - len(left)
        assert 1 <= begun <= 1 + 0.0011 / tls_arrivals.OPENING_SECONDS
        assert all(one.transport is not None for one in waiting[:begun])
        assert left == waiting[begun:]
        # One that leaves meanwhile, or is given up, waits no longer.
        arrivals._give_up(left[0])
        assert list(arrivals._waiting[THERE]) == left[1:]
        # Time for all: some of the network are no part of the flood.
        for one in waiting:
            one.due = 0.0
        arrivals._next()
        await until(lambda: not arrivals._waiting)
        assert all(one.transport is not None for one in left[1:])
    finally:
        listener.close()
        for one in callers:
            one.close()
        await until(lambda: listener.num_opening == 0)


async def test_the_most_that_a_network_waits_is_a_fifth_of_a_second() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(FILES / "server.pem", FILES / "server.key")
    (listener,), port = await Listener.bind(HERE, 0, asyncio.Protocol, tls, 60.0, 256, pace=HandshakePace(1e-6))
    listener.start()
    callers = [_caller(THERE, port) for _ in range(100)]
    for one in callers:
        one.sendall(_hello())
    try:
        # By the pace alone it would take a day.
        arrivals = listener._arrivals
        assert arrivals is not None
        await until(lambda: sum(one.transport is not None for one in arrivals._all) == 100)
    finally:
        listener.close()
        for one in callers:
            one.close()
        await until(lambda: listener.num_opening == 0)


async def test_a_handshake_begins_once_its_first_record_is_whole() -> None:
    """The costly bytes of those that sent one byte before came in one turn, and counted for nobody."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(FILES / "server.pem", FILES / "server.key")
    pace = HandshakePace(1e-9)
    (listener,), port = await Listener.bind(HERE, 0, asyncio.Protocol, tls, 60.0, 64, pace=pace)
    listener.start()
    hello, caller = _hello(), _caller(HERE, port)
    arrivals = listener._arrivals
    assert arrivals is not None
    try:
        for begin, end in ((0, 1), (1, 4), (4, 5), (5, 100), (100, len(hello) - 1)):
            caller.sendall(hello[begin:end])
            await asyncio.sleep(0.05)
            (arrival,) = arrivals._all
            assert (arrival.transport, pace._now(HERE)) == (None, 0)
        caller.sendall(hello[-1:])
        caller.setblocking(False)
        # The server's first record: it is of the handshake.
        assert (await asyncio.get_running_loop().sock_recv(caller, 1)) == b"\x16"
        assert pace._now(HERE) > tls_arrivals.OPENING_SECONDS
    finally:
        listener.close()
        caller.close()
        await until(lambda: listener.num_opening == 0)


async def test_what_fails_in_the_begin_of_a_handshake_leaves_no_socket() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def fail() -> asyncio.Protocol:
        raise MemoryError

    (listener,), port = await Listener.bind(HERE, 0, fail, tls, 60.0, 64)
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    listener.start()
    caller = _caller(HERE, port)
    try:
        caller.sendall(_hello())
        await until(lambda: bool(told))
        assert isinstance(told[0], MemoryError)
        await until(lambda: listener.num_opening == 0)
    finally:
        listener.close()
        caller.close()


async def test_a_network_that_is_looked_at_in_a_turn_that_is_taken_begins_no_second_row_of_turns() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(FILES / "server.pem", FILES / "server.key")
    (listener,), port = await Listener.bind(HERE, 0, asyncio.Protocol, tls, 60.0, 64)
    listener.start()
    arrivals = listener._arrivals
    assert arrivals is not None
    callers = [_caller(HERE, port) for _ in range(20)]
    try:
        await until(lambda: listener.num_opening == len(callers))
        for one in callers:
            one.sendall(_hello())
        await until(lambda: arrivals._is_turn_taken)
        waiting = len(arrivals._waiting.get(HERE, ()))
        arrivals._look()
        assert len(arrivals._waiting.get(HERE, ())) == waiting > 0
    finally:
        listener.close()
        for one in callers:
            one.close()
        await until(lambda: listener.num_opening == 0)


async def test_a_family_that_the_kernel_lacks_does_not_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a name with addresses of both, where IPv6 is switched off."""

    async def both(*_: object, **__: object) -> list[tuple[Any, ...]]:
        # No kernel has a family of this number.
        lacking = (9999, socket.SOCK_STREAM, 6, "", ("::1", 0))
        return [lacking, (socket.AF_INET, socket.SOCK_STREAM, 6, "", (HERE, 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
    (listener,), port = await Listener.bind("penstock.example", 0, asyncio.Protocol, None, 60.0, 6)
    assert port
    listener.close()


async def test_a_taken_port_leaves_nothing_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address before the one that is taken is free again."""
    with socket.create_server((THERE, 0)) as taken:
        port = taken.getsockname()[1]

        async def both(*_: object, **__: object) -> list[tuple[Any, ...]]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in (HERE, THERE)]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
        with pytest.raises(OSError, match="in use"):
            await Listener.bind("penstock.example", port, asyncio.Protocol, None, 60.0, 6)
        socket.create_server((HERE, port)).close()
