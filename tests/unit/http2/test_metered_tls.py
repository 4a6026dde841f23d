"""TLS that tells what its reading costs."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import factories.servers.tiny_service
from factories.servers.router import until
from penstock.http2.listener import Listener
from penstock.http2.metered_tls import MeteredTls, meter, stop_metering

FILES = Path(factories.servers.tiny_service.__file__).parent / "tls"
CA = str(FILES / "ca.pem")
MOST_HELD = 32 << 10


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(FILES / "server.pem", FILES / "server.key")
    return context


def ends() -> tuple[MeteredTls, ssl.SSLObject]:
    """Both ends of a connection of the memory alone, their handshake done."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=CA).wrap_bio(to_client, to_server, server_hostname="localhost")
    context = server_context()
    context.sslobject_class = MeteredTls
    server = context.wrap_bio(to_server, to_client, server_side=True)
    assert isinstance(server, MeteredTls)
    for _ in range(3):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return server, client


def read_all(server: MeteredTls) -> bytes:
    """Read until there is nothing more, as asyncio does."""
    found = b""
    with contextlib.suppress(ssl.SSLWantReadError):
        while True:
            found += server.read(1 << 14)
    return found


def test_a_reading_is_told_once_however_many_records_it_has() -> None:
    server, client = ends()
    told: list[float] = []
    server.on_read = told.append
    for _ in range(1000):
        client.write(b"a")
    assert read_all(server) == b"a" * 1000
    assert len(told) == 1
    assert told[0] > 0
    assert read_all(server) == b""
    assert len(told) == 2


def test_an_end_is_told_too() -> None:
    server, client = ends()
    told: list[float] = []
    server.on_read = told.append
    with contextlib.suppress(ssl.SSLWantReadError):
        client.unwrap()
    assert server.read(1 << 14) == b""
    assert len(told) == 1


def test_nobody_is_told_where_nobody_asks() -> None:
    server, client = ends()
    client.write(b"a")
    assert read_all(server) == b"a"


class Paused(asyncio.Protocol):
    """Server's end that stops reading at once."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        meter(transport, lambda _: None)
        transport.pause_reading()


async def test_few_bytes_wait_to_be_decrypted_at_once() -> None:
    made: list[Paused] = []

    def make() -> Paused:
        made.append(Paused())
        return made[-1]

    (listener,), port = await Listener.bind("127.0.0.1", 0, make, server_context(), 10.0, 8)
    listener.start()
    _, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=ssl.create_default_context(cafile=CA), server_hostname="localhost"
    )
    writer.write(bytes(1 << 20))
    await until(lambda: bool(made) and hasattr(made[0], "transport"))
    transport = made[0].transport
    own = transport.get_extra_info("ssl_object")
    assert isinstance(own, MeteredTls)
    held: asyncio.Transport = transport
    size = lambda: held.get_read_buffer_size()  # type: ignore[attr-defined]  # noqa: E731
    await until(lambda: size() >= MOST_HELD / 2)
    # What was read in the turns since then is no more than one reading.
    for _ in range(100):
        await asyncio.sleep(0)
        assert size() <= MOST_HELD
    stop_metering(transport)
    assert own.on_read is None
    # As much as asyncio's own is held again.
    await until(lambda: size() > 4 * MOST_HELD)
    writer.transport.abort()
    transport.abort()
    listener.close()
