"""The attacker of the gateway: tricks that say what they should, to loopback alone, and no more than they may."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from factories.wire.http_attacker import HttpAttacker
from factories.wire.http_tricks import (
    BODY_BYTES,
    FAULTS,
    HEAVY_BODIES,
    HTTP_TRICKS,
    HttpTrick,
    Target,
    Then,
    tricks_for,
)

TARGET = Target("127.0.0.1:80", "token")


class Listener:
    """A server that answers each head with a status, and counts."""

    def __init__(self) -> None:
        self.connections = 0
        self.received = 0
        self.address = ""

    async def __aenter__(self) -> Listener:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while data := await reader.read(1 << 16):
                self.received += len(data)
                writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n" * data.count(b"\r\n\r\n"))
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()


@pytest.mark.parametrize("name", HTTP_TRICKS)
def test_a_trick_makes_bytes_and_makes_them_again(name: str) -> None:
    trick = HTTP_TRICKS[name]
    pieces, again = (list(itertools.islice(trick.make(TARGET), 50)) for _ in range(2))
    assert pieces == again
    assert all(pieces)
    if not trick.needs_token:
        assert not any(b"Bearer token" in piece for piece in pieces)


@pytest.mark.parametrize("name", HEAVY_BODIES)
def test_a_heavy_body_is_as_large_as_may_be(name: str) -> None:
    body = HEAVY_BODIES[name]()
    assert BODY_BYTES // 2 < len(body) <= BODY_BYTES
    assert (body[:1], body[-1:]) == (b"{", b"}")
    assert body.isascii()


def test_faults_are_json() -> None:
    for _, body in FAULTS:
        json.loads(body, parse_int=len)


def test_those_of_tls_are_not_played_without_it() -> None:
    assert tricks_for(False).keys() < tricks_for(True).keys() == HTTP_TRICKS.keys()


def test_only_loopback_is_attacked() -> None:
    for address in ("192.0.2.1:80", "example.com:80", "localhost:80"):
        with pytest.raises(ValueError, match="loopback"):
            HttpAttacker(address, TARGET)


async def test_it_keeps_to_its_bounds_and_stops() -> None:
    async with Listener() as listener:
        attacker = HttpAttacker(listener.address, TARGET, bytes_per_second=1 << 20, attempts_per_second=1e6)
        async with asyncio.timeout(60):
            await attacker.attack([HTTP_TRICKS["pipelined requests"]], 3, seconds=1.0, trick_seconds=1.0)
        done = attacker.done
        assert done.connections == listener.connections == 3
        assert done.statuses.keys() == {"401"}
        # A second of it, what is saved up, and a piece for each.
        assert 0 < done.sent_bytes <= (1 << 20) * 1.1 + 3 * (1 << 16)


async def test_it_comes_back_as_often_as_it_may() -> None:
    trick = HttpTrick("one", lambda _: iter((b"a\r\n\r\n",)), then=Then.ANSWER)
    async with Listener() as listener:
        attacker = HttpAttacker(listener.address, TARGET, attempts_per_second=20)
        async with asyncio.timeout(60):
            await attacker.attack([trick], 2, seconds=1.0, trick_seconds=1.0)
        assert 2 <= attacker.done.connections <= 20 * 1.1 + 2


async def test_a_pour_ends_at_its_bytes_and_a_crowd_is_whole() -> None:
    async with Listener() as listener:
        one = HttpAttacker(listener.address, TARGET)
        async with one.poured(HTTP_TRICKS["header lines"], 1 << 20, 60.0):
            assert (1 << 20) < one.done.sent_bytes < (1 << 20) + (1 << 17)
        async with one.crowd(HTTP_TRICKS["half-sent bodies of a megabyte"]):
            assert one.done.connections == 1 + 128
