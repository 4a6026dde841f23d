"""Connecting of the asyncio transport: names with several addresses, peers that do not answer."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import factories.servers.tiny_service
import grpc
import pytest
from penstock.http2.channel import Peer

FILES = Path(factories.servers.tiny_service.__file__).parent / "tls"


@pytest.fixture
def silent() -> Iterator[int]:
    """A port of 127.0.0.2 where a connection is never made: the queue of its listener is full."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.2", 0))
        listener.listen(0)
        for one in (first, second):
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


async def test_a_silent_address_of_a_name_does_not_keep_the_next_one_from_being_used(
    silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def both(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        # uvloop asks for addresses, too, when it connects.
        ips = ("127.0.0.2", "127.0.0.1") if host == "tokenizer.example" else (host,)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ips]

    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", silent)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
    made: list[asyncio.BaseTransport] = []

    class Taken(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    await Peer(f"tokenizer.example:{silent}").connect(Taken, 60.0)
    assert [one.get_extra_info("peername") for one in made] == [("127.0.0.1", silent)]
    made[0].close()
    server.close()
    await server.wait_closed()


async def test_a_peer_that_does_not_answer_in_time_is_said_so(silent: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await Peer(f"127.0.0.2:{silent}").connect(asyncio.Protocol, 0.05)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert raised.value.details() == "no connection: no answer within 0.05 s"


_TLS_SERVER = """
import socket, ssl, sys, threading

def serve(connection):
    try:
        with tls.wrap_socket(connection, server_side=True) as wrapped:
            while wrapped.recv(100):
                pass
    except OSError:
        pass

tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(*sys.argv[1:])
listener = socket.create_server(("127.0.0.1", 0), backlog=256)
print(listener.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


@pytest.fixture
def tls_port() -> Iterator[int]:
    """Port of a TLS server in a process of its own, so that the numbers of its sockets are not this one's."""
    files = (str(FILES / "server.pem"), str(FILES / "server.key"))
    with subprocess.Popen([sys.executable, "-c", _TLS_SERVER, *files], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.kill()


async def test_a_connection_that_is_given_up_leaves_the_next_one_alone(tls_port: int) -> None:
    """Its socket is the loop's: where another closes it, its number is a next one's, which asyncio refuses for 30 s.

    It is given up when its handshake is done and nobody knows yet: only then does asyncio end it slowly.
    """
    peer = Peer(f"localhost:{tls_port}", ssl.create_default_context(cafile=FILES / "ca.pem"))
    made: list[asyncio.Transport] = []

    class Taken(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(cast("asyncio.Transport", transport))

    class Cancelling(Taken):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            task.cancel()

    task = asyncio.create_task(peer.connect(Cancelling, 60.0))
    with pytest.raises(asyncio.CancelledError):
        await task
    await peer.connect(Taken, 60.0)
    assert len(made) == 2
    for transport in made:
        transport.abort()
