"""Connecting of the asyncio transport: names with several addresses, peers that do not answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import grpc
import pytest
from penstock.http2.channel import Peer


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
