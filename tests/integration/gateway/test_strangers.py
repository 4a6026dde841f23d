"""Callers without a token, and some with one, who try to fill, to occupy and to break a real gateway process.

Each test asks for what callers see: a status, an answer for somebody else meanwhile, the memory of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
from collections.abc import Iterator

import pytest
from factories.servers.gateway_tree import TOKEN, GatewayTree, gateway_tree
from factories.wire.http_attacker import HttpAttacker
from factories.wire.http_tricks import CHAT, COMPLETIONS, FAULTS, HTTP_TRICKS, Target, head, post

MIB = 1 << 20
STATUS = re.compile(rb"HTTP/1\.[01] (\d\d\d)")
# Sent by one connection, and what of it the process may keep.
POURED_BYTES, MOST_MIB = 100 * MIB, 32
# A server that takes nothing for so long holds its sender up: it keeps nothing more.
HELD_SECONDS = 2.0
# In which an answer comes that does come.
PATIENCE_SECONDS = 10.0
ENDLESS = (
    "trailers",
    "one trailer",
    "trailers that nobody reads",
    "trailers of a request that has its answer",
    "header lines",
    "one header",
    "header lines behind a body",
    "header lines behind an answer that nobody reads",
    "header lines behind an answer under way",
    "requests behind an answer under way",
    "pipelined requests that nobody reads",
    "page files that nobody reads",
    "chunk extensions",
    "a chunk's size in zeros",
    "chunks without end",
    "wrong tokens",
    "new names",
)
CROWDS = ("half-sent bodies", "half a head", "one request, and then nothing", "nothing")
# Of the attacker: the address of everybody else here, as behind a proxy, and one of its own.
SOURCES = ("127.0.0.1", "127.0.0.2")
# Of the second address the ordinary run has one.
FROM_WHERE = [
    pytest.param(name, source, marks=[pytest.mark.slow] if source == SOURCES[1] and name != "nothing" else [])
    for name in CROWDS
    for source in SOURCES
]


@contextlib.contextmanager
def running(*, is_tls: bool) -> Iterator[GatewayTree]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    with gateway_tree(is_tls=is_tls) as ready:
        yield ready
        assert ready.is_running


@pytest.fixture(scope="module")
def http() -> Iterator[GatewayTree]:
    with running(is_tls=False) as ready:
        yield ready


@pytest.fixture(scope="module")
def tls() -> Iterator[GatewayTree]:
    with running(is_tls=True) as ready:
        yield ready


def target(tree: GatewayTree) -> Target:
    return Target(tree.address, TOKEN)


def attacker(tree: GatewayTree, source: str | None = None) -> HttpAttacker:
    return HttpAttacker(tree.address, target(tree), tree.tls, source=source)


def asking(tree: GatewayTree, *fields: str, tokens: int = 1) -> bytes:
    """A request that is answered soon."""
    body = json.dumps({"prompt": [1], "max_tokens": tokens, "ignore_eos": True}).encode()
    return post(target(tree), COMPLETIONS, body, *fields)


async def statuses(tree: GatewayTree, data: bytes, count: int = 1) -> list[int]:
    """The first statuses on a connection that sends these bytes; fewer where it is closed before."""
    host, _, port = tree.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tree.tls)
    said, found = b"", list[int]()
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            writer.write(data)
            while len(found) < count and (piece := await reader.read(1 << 16)):
                said += piece
                found = [int(status) for status in STATUS.findall(said) if status != b"100"]
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return found[:count]


async def others_are_served(tree: GatewayTree) -> None:
    """Health and an authorised caller have their answers, several times."""
    for _ in range(3):
        assert await statuses(tree, head(target(tree), "GET", "/health")) == [200]
        assert await statuses(tree, asking(tree, f"Authorization: Bearer {TOKEN}")) == [200]


async def pour(tree: GatewayTree, name: str) -> None:
    """One connection plays a trick without end; the process keeps little of it, and others are served."""
    await others_are_served(tree)
    before, one = tree.rss_bytes, attacker(tree)
    async with one.poured(HTTP_TRICKS[name], POURED_BYTES, HELD_SECONDS):
        assert await statuses(tree, head(target(tree), "GET", "/health")) == [200]
        assert (tree.rss_bytes - before) / MIB < MOST_MIB, f"after {one.done.sent_bytes >> 20} MiB"
    assert one.done.sent_bytes
    await others_are_served(tree)


@pytest.mark.parametrize("name", ENDLESS)
async def test_what_has_no_end_is_not_kept(http: GatewayTree, name: str) -> None:
    await pour(http, name)


@pytest.mark.parametrize("name", ["trailers", "header lines behind an answer under way", "records of noise", "no TLS"])
async def test_nor_is_it_over_tls(tls: GatewayTree, name: str) -> None:
    await pour(tls, name)


async def crowd(tree: GatewayTree, name: str, source: str) -> None:
    """Many connections are open at a time; others are served beside them and behind them."""
    many = attacker(tree, source)
    async with many.crowd(HTTP_TRICKS[name]):
        await others_are_served(tree)
    await others_are_served(tree)


@pytest.mark.parametrize(("name", "source"), FROM_WHERE)
async def test_a_crowd_that_says_nothing_does_not_shut_the_door(http: GatewayTree, name: str, source: str) -> None:
    await crowd(http, name, source)


@pytest.mark.parametrize(
    "name", [pytest.param("half-sent bodies", marks=pytest.mark.slow), "nothing", "half a hello of TLS"]
)
async def test_nor_does_it_over_tls(tls: GatewayTree, name: str) -> None:
    await crowd(tls, name, SOURCES[0])


async def test_the_token_is_asked_before_the_body_is_read(http: GatewayTree) -> None:
    for fields in ((), ("Authorization: Bearer wrong",), ("X-Api-Key: wrong",)):
        for length in ("Content-Length: 4000000", "Transfer-Encoding: chunked"):
            begun = head(target(http), "POST", CHAT, length, *fields) + b"1\r\n{"
            assert await statuses(http, begun) == [401]


async def test_nobody_has_a_500_and_the_log_stays_short(http: GatewayTree) -> None:
    before = http.log_bytes
    for path, body in FAULTS:
        for token in ((), (f"Authorization: Bearer {TOKEN}",)):
            asked = post(target(http), path, body, *token)
            found = await statuses(http, asked * 20, 20)
            assert found, path
            assert all(400 <= status < 500 for status in found), (path, body[:80])
    assert http.log_bytes - before < 100_000


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/"])
async def test_a_request_has_one_host(http: GatewayTree, path: str) -> None:
    at = target(http)
    assert await statuses(http, head(at, "GET", path, host="")) == [400]
    assert await statuses(http, head(at, "GET", path, "Host: b.example")) == [400]
    assert await statuses(http, head(at, "GET", path, f"Host: {http.address}")) == [400]


async def test_a_length_beside_chunks_is_refused(http: GatewayTree) -> None:
    both = head(target(http), "POST", CHAT, "Content-Length: 7", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"
    assert await statuses(http, both) == [400]


async def test_names_of_this_machine_are_no_strangers(http: GatewayTree) -> None:
    at, port = target(http), http.address.rpartition(":")[2]
    for host in (
        "localhost",
        f"localhost:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port}",
        f"LOCALHOST:{port}",
        f"[::1]:{port}",
    ):
        assert await statuses(http, head(at, "GET", "/version", host=host)) == [200]
    assert await statuses(http, head(at, "GET", "/version", version="1.0")) == [200]


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "a/1, b/2"])
async def test_a_protocol_that_is_not_spoken_changes_nothing(http: GatewayTree, protocol: str) -> None:
    """RFC 9110, 7.8: a server may ignore Upgrade; the connection goes on with HTTP/1.1."""
    at = target(http)
    upgrade = (f"Upgrade: {protocol}", "Connection: Upgrade")
    asked = head(at, "GET", "/version", *upgrade) + asking(http, *upgrade) + head(at, "GET", "/health")
    assert await statuses(http, asked, 3) == [200, 401, 200]
