"""Costs of callers that have shown no token, and of one tenant for others: memory, places, connections, names."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import ssl
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories.servers.emitting_backend import count_up
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.gateway_tree import CA, TLS_FILES
from factories.servers.http_connection import Connection
from factories.servers.router import backend, running_router, until
from penstock.gateway import endpoint
from penstock.gateway.http_server import HttpConnection

CERT, KEY = (str(TLS_FILES / name) for name in ("server.pem", "server.key"))
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
RIGHT, OTHER, WRONG = (f"authorization: Bearer {token}" for token in ("right", "other", "wrong"))
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: 1000\r\n\r\n{"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@asynccontextmanager
async def guarded(tmp_path: Path, **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway before a router that knows two tokens."""
    tokens = tmp_path / "tokens"
    tokens.write_text("right\nother\n")
    async with (
        backend(script=count_up(1_000_000), obeys_budget=False, step_seconds=0.001) as one,
        running_router(one, auth_token_file=str(tokens)) as router,
        running_gateway(router.server.address, **settings) as gateway,
    ):
        yield gateway


@asynccontextmanager
async def unguarded(**settings: Any) -> AsyncIterator[Gateway]:
    """A gateway before a router that asks nobody."""
    async with (
        backend() as one,
        running_router(one) as router,
        running_gateway(router.server.address, **settings) as gateway,
    ):
        yield gateway


async def connections(gateway: Gateway, count: int, data: bytes = b"") -> list[Connection]:
    """Open connections, and send `data` over each."""
    made = [await Connection.to(gateway) for _ in range(count)]
    for one in made:
        one.writer.write(data)
    return made


async def status_of(gateway: Gateway, data: bytes) -> int:
    """Send a request and read its status."""
    connection = await Connection.to(gateway)
    connection.writer.write(data)
    found = await connection.status()
    connection.close()
    return found


async def taken(connection: Connection, piece: bytes, most: int) -> int:
    """Send pieces until the other side takes no more; return the bytes that it took, `most` if it never ends."""
    sent = 0
    try:
        while sent < most:
            connection.writer.write(piece)
            await connection.writer.drain()
            sent += len(piece)
    except OSError:
        pass
    return sent


LINES = b"x-more: " + b"y" * 1000 + b"\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n%b\r\n"


@pytest.mark.parametrize(
    "head",
    [
        CHUNKED % b"" + b"2\r\n{}\r\n0\r\n",
        CHUNKED % (RIGHT.encode() + b"\r\n") + b"2\r\n{}\r\n0\r\n",
        CHUNKED % (RIGHT.encode() + b"\r\n") + b'2;x="',
        HEALTH + b"GET / HTTP/1.1\r\n",
        HEALTH * 3 + b"GET /",
    ],
    ids=["trailers", "trailers with a token", "a chunk's extension", "headers behind an answer", "a url"],
)
async def test_what_is_no_body_has_one_bound_in_every_state(head: bytes, tmp_path: Path) -> None:
    async with guarded(tmp_path) as gateway:
        (connection,) = await connections(gateway, 1, head)
        # Its sockets take some.
        assert await taken(connection, LINES * 16, 64 << 20) < 16 << 20
        connection.close()
        await until(lambda: gateway.metric("http_connections") == 0)


async def test_headers_behind_an_answer_under_way_have_the_same_bound(tmp_path: Path) -> None:
    async with guarded(tmp_path) as gateway:
        connection = await Connection.to(gateway)
        connection.post(CHAT, {"messages": HELLO, "stream": True}, RIGHT)
        assert await connection.status() == 200
        connection.writer.write(b"GET / HTTP/1.1\r\n")
        reading = asyncio.create_task(connection.until_closed())
        assert await taken(connection, LINES * 16, 64 << 20) < 16 << 20
        await reading
        await until(lambda: gateway.metric("http_requests_in_flight") == 0)


async def test_headers_are_counted_too() -> None:
    async with unguarded() as gateway:
        assert await status_of(gateway, HEALTH[:-2] + b"a: b\r\n" * 127 + b"\r\n") == 200
        assert await status_of(gateway, HEALTH[:-2] + b"a: b\r\n" * 128 + b"\r\n") == 431


async def test_a_target_that_is_too_long_is_414() -> None:
    async with unguarded() as gateway:
        get = b"GET /v1/models/%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert await status_of(gateway, get % (b"%41" * 2000)) == 404
        assert await status_of(gateway, get % (b"%41" * 3000)) == 414
        assert await status_of(gateway, get % (b"?" + b"a" * (8 << 10))) == 414


async def test_requests_behind_too_many_others_are_not_looked_at(tmp_path: Path) -> None:
    async with guarded(tmp_path) as gateway:
        heads: list[bytes] = []
        protocol = gateway.app._server._protocol
        begin = protocol.on_message_begin

        def counted(connection: Any) -> None:
            heads.append(b"")
            begin(connection)

        protocol.on_message_begin = counted
        connection = await Connection.to(gateway)
        connection.post(CHAT, {"messages": HELLO, "stream": True}, RIGHT)
        assert await connection.status() == 200
        connection.writer.write(HEALTH * 5000)
        await connection.until_closed()
        # It hangs up behind the 64th, and the parser stops within the bytes that it has.
        assert len(heads) < 80


async def test_a_flood_of_probes_on_few_connections_holds_up_no_other_probe(tmp_path: Path) -> None:
    # A turn of strangers takes minutes.
    async with guarded(tmp_path, anonymous_cpu_share=0.00001) as gateway:
        server = gateway.app._server
        for turns in (gateway.app._probe_turns, server._everyone.answers):
            while turns.is_free():
                turns.delay()
        for _ in range(3):
            assert await status_of(gateway, HEALTH) == 200
        (flood,) = await connections(gateway, 1, HEALTH)
        assert await flood.status() == 200
        flood.writer.write(HEALTH)
        await until(lambda: any(one._delayed is not None for one in server._state.connections))
        # Those that ask once are bounded, too.
        firsts = server._everyone.firsts
        while firsts.is_free():
            firsts.delay()
        # A connection that nobody holds is closed.
        (last,) = await connections(gateway, 1, HEALTH)
        await until(lambda: sum(one._delayed is not None for one in server._state.connections) == 2)
        last.close()


async def test_a_request_that_leaves_before_its_turn_gives_back_its_own(tmp_path: Path) -> None:
    async with guarded(tmp_path) as gateway:
        server = gateway.app._server
        answers, probes = server._everyone.answers, gateway.app._probe_turns
        # Another answer has this turn of the loop, and none is given another.
        server._everyone.starts._is_taken = True
        before = answers._next_at, probes._next_at
        (probe,) = await connections(gateway, 1, HEALTH)
        await until(lambda: any(one._delayed is not None for one in server._state.connections))
        taken = probes._next_at
        assert answers._next_at == before[0]
        assert taken > before[1]
        probe.close()
        await until(lambda: not server._state.connections)
        assert answers._next_at == before[0]
        assert probes._next_at < taken


async def test_a_body_of_short_chunks_is_parsed_in_short_slices(tmp_path: Path, monkeypatch: Any) -> None:
    async with guarded(tmp_path) as gateway:
        slices: list[int] = []
        feed = HttpConnection._feed

        def counted(connection: HttpConnection, data: bytes) -> None:
            slices.append(len(data))
            feed(connection, data)

        monkeypatch.setattr(HttpConnection, "_feed", counted)
        connection = await Connection.to(gateway)
        connection.writer.write(CHUNKED % b"" + b"1\r\n \r\n" * 3000)
        assert await connection.status() == 401
        assert max(slices) <= 2 << 10


async def test_all_that_a_connection_held_is_free_when_it_closes(tmp_path: Path) -> None:
    async with guarded(tmp_path) as gateway:
        gc.collect()
        gc.disable()
        try:
            for data in (HEALTH, HEALTH + b"GET / HTTP/1.1\r\n" + LINES, HALF % (RIGHT.encode() + b"\r\n"), HALF % b""):
                (connection,) = await connections(gateway, 1, data)
                await until(lambda: gateway.metric("http_connections") == 1)
                kept = [weakref.ref(part) for one in gateway.app._server._state.connections for part in (one, one._own)]
                connection.close()
                await until(lambda: gateway.metric("http_connections") == 0)
                await until(lambda: not any(one() for one in kept))  # noqa: B023
        finally:
            gc.enable()


@pytest.mark.parametrize("shown", ["", WRONG])
async def test_the_token_is_asked_before_the_body_is_read(shown: str, tmp_path: Path) -> None:
    async with guarded(tmp_path) as gateway:
        line = shown.encode() + b"\r\n" if shown else b""
        # Its body never comes.
        assert await status_of(gateway, HALF % line) == 401
        assert gateway.metric("http_body_bytes") == 0


async def test_a_large_body_with_a_wrong_token_has_its_answer(tmp_path: Path) -> None:
    async with guarded(tmp_path) as gateway:
        connection = await Connection.to(gateway)
        text = "x" * (3 << 20)
        connection.post(CHAT, {"messages": [{"role": "user", "content": text}]}, WRONG)
        # All is sent before anything is read: a connection that is cut off would lose the answer.
        await connection.writer.drain()
        assert await connection.status() == 401
        assert b"invalid_api_key" in await connection.until_closed()


async def test_a_token_is_asked_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(tmp_path) as gateway:
        callers, asked = gateway.app._callers, list[str]()
        judge = callers._judge

        async def count(token: str) -> Any:
            asked.append(token)
            return await judge(token)

        monkeypatch.setattr(callers, "_judge", count)
        for shown, status in ((RIGHT, 200), (WRONG, 401)):
            asked.clear()
            for _ in range(5):
                line = shown.encode() + b"\r\n"
                assert (
                    await status_of(gateway, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n%b\r\n" % line) == status
                )
            # Without a token first, as long as that is not known.
            assert [token for token in asked if token] == [shown.split()[-1]]


async def test_a_known_token_outlives_a_router_that_is_away(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("right\n")
    async with (
        backend() as one,
        running_router(one, auth_token_file=str(tokens)) as router,
        running_gateway(router.server.address, token_seconds=0.0) as gateway,
    ):
        known = await gateway.app._callers.admit(b"Bearer right")
        await router.server.stop(drain=False)
        assert await gateway.app._callers.admit(b"Bearer right") is known


async def test_halves_of_bodies_hold_no_places() -> None:
    async with unguarded(max_requests=2) as gateway:
        halves = await connections(gateway, 10, HALF % b"")
        await until(lambda: gateway.metric("http_connections") == 10)
        connection = await Connection.to(gateway)
        connection.post("/tokenize", {"prompt": "x"})
        assert await connection.status() == 200
        for one in [*halves, connection]:
            one.close()


async def test_a_body_that_is_not_whole_makes_room_for_others() -> None:
    async with unguarded(max_body_bytes=2048, max_bodies_bytes=2048) as gateway:
        oldest, younger = [
            (await connections(gateway, 1, (HALF % b"").replace(b"1000", b"1900") + b'"messages": ' + b" " * 900))[0]
            for _ in range(2)
        ]
        await until(lambda: gateway.metric("http_body_bytes") > 1800)
        connection = await Connection.to(gateway)
        connection.post("/tokenize", {"prompt": "x" * 900})
        assert await connection.status() == 200
        assert await oldest.status() == 429
        await until(lambda: 0 < gateway.metric("http_body_bytes") < 1800)
        for one in (oldest, younger, connection):
            one.close()
        await until(lambda: gateway.metric("http_body_bytes") == 0)


async def test_silent_connections_shut_nobody_out(tmp_path: Path) -> None:
    settings: Any = {"max_connections": 40, "anonymous_connections": 16, "anonymous_connections_each": 8}
    async with guarded(tmp_path, **settings) as gateway:
        silent = await connections(gateway, 100)
        assert await status_of(gateway, HEALTH) == 200
        assert gateway.metric("http_connections_evicted_total") >= 92
        connection = await Connection.to(gateway)
        connection.post("/tokenize", {"prompt": "x"}, RIGHT)
        assert await connection.status() == 200
        await until(lambda: gateway.metric("http_connections") <= 9)
        assert gateway.metric("http_anonymous_connections") <= 8
        # The oldest have gone, the newest are there.
        assert await silent[0].until_closed() == b""
        for one in [*silent, connection]:
            one.close()


async def test_admitted_connections_that_rest_make_room(tmp_path: Path) -> None:
    async with guarded(tmp_path, max_connections=4) as gateway:
        asked = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + RIGHT.encode() + b"\r\n\r\n"
        at_work = await Connection.to(gateway)
        at_work.post(CHAT, {"messages": HELLO, "stream": True}, RIGHT)
        assert await at_work.status() == 200
        resting = []
        for _ in range(3):
            resting += await connections(gateway, 1, asked)
            assert await resting[-1].status() == 200
        assert await status_of(gateway, asked) == 200
        assert (await resting[0].until_closed()).endswith(b"}")
        assert await at_work.reader.readline()
        for one in [*resting, at_work]:
            one.close()


async def test_a_request_whose_reader_left_ends_though_another_came_behind_it(tmp_path: Path) -> None:
    async with guarded(tmp_path) as gateway:
        connection = await Connection.to(gateway)
        connection.post(CHAT, {"messages": HELLO, "stream": True}, RIGHT)
        assert await connection.status() == 200
        connection.writer.write(HEALTH)
        await connection.writer.drain()
        connection.close()
        await until(lambda: gateway.metric("http_requests_in_flight") == 0)


async def test_one_tenant_cannot_take_all_places(tmp_path: Path) -> None:
    async with guarded(tmp_path, max_requests=4, tenant_share=0.5) as gateway:
        streams = []
        for status in (200, 200, 429):
            streams.append(await Connection.to(gateway))
            streams[-1].post(CHAT, {"messages": HELLO, "stream": True}, RIGHT)
            assert await streams[-1].status() == status
        assert b"--tenant-share" in await streams[-1].reader.readuntil(b"}}")
        other = await Connection.to(gateway)
        other.post(CHAT, {"messages": HELLO, "stream": True}, OTHER)
        assert await other.status() == 200
        for one in [*streams, other]:
            one.close()
        await until(lambda: gateway.metric("http_requests_in_flight") == 0)


async def test_made_up_tokens_are_one_tenant() -> None:
    async with unguarded() as gateway:
        callers = gateway.app._callers
        tenants = {(await callers.admit(shown)).tenant for shown in (None, b"Bearer a", b"Bearer b")}
        assert tenants == {""}


async def test_large_bodies_are_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, threads = endpoint.parse_object, list[bool]()

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return parse(*args)

    monkeypatch.setattr(endpoint, "parse_object", noted)
    async with unguarded() as gateway:
        for size in (10, 100_000):
            connection = await Connection.to(gateway)
            connection.post("/tokenize", {"prompt": "x" * size, "more": [1] * size})
            assert await connection.status() in (200, 400)
            connection.close()
    assert threads == [True, False]


GET = b"GET /v1/models HTTP/1.1\r\n"
WRONG_HEADS = {
    "no host": GET,
    "two hosts": GET + b"host: localhost\r\nhost: localhost\r\n",
    "two hosts of 1.0": b"GET /health HTTP/1.0\r\nhost: localhost\r\nhost: localhost\r\n",
    "a host that is a list": GET + b"host: localhost, evil.example\r\n",
    "a host with a user": GET + b"host: me@localhost\r\n",
    "a host with a path": GET + b"host: localhost/x\r\n",
    "te": GET + b"host: localhost\r\nte: chunked\r\n",
    "another coding": GET + b"host: localhost\r\ntransfer-encoding: gzip, chunked\r\n",
    "two codings": GET + b"host: localhost\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
    "a coding and a length": GET + b"host: localhost\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n",
    "a coding of 1.0": b"POST /tokenize HTTP/1.0\r\ntransfer-encoding: chunked\r\n",
    "two lengths": GET + b"host: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n",
}


@pytest.fixture(scope="module")
def heads() -> dict[str, bytes]:
    return {name: head + b"\r\n" for name, head in WRONG_HEADS.items()}


async def test_heads_that_rfc_9112_refuses_are_400(heads: dict[str, bytes]) -> None:
    async with unguarded() as gateway:
        found = {name: await status_of(gateway, head) for name, head in heads.items()}
    assert found == dict.fromkeys(heads, 400)


async def test_a_malformed_request_has_an_error_of_the_usual_form() -> None:
    async with unguarded() as gateway:
        (connection,) = await connections(gateway, 1, b"nonsense\r\n\r\n")
        answer = await connection.until_closed()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["reason"] == "MALFORMED_REQUEST"


async def test_nonsense_behind_a_stream_is_no_part_of_its_answer(tmp_path: Path) -> None:
    async with guarded(tmp_path) as gateway:
        connection = await Connection.to(gateway)
        connection.post(CHAT, {"messages": HELLO, "stream": True}, RIGHT)
        assert await connection.status() == 200
        connection.writer.write(b"nonsense\r\n\r\n")
        assert b"HTTP/1.1 400" not in await connection.until_closed()


@pytest.mark.parametrize("cut", [0, 60, 64, 70, 105])
async def test_a_request_that_would_speak_another_protocol_keeps_its_body(cut: int) -> None:
    """As the first request of a client that could speak HTTP/2 (Java's, for one)."""
    asked = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade, HTTP2-Settings\r\n"
    asked += b"UPGRADE: h2c\r\nhttp2-settings: AAEAAEAA\r\ncontent-length: 15\r\n\r\n" + b'{"prompt": "x"}'
    async with unguarded() as gateway:
        connection = await Connection.to(gateway)
        for _ in range(2):
            connection.writer.write(asked[:cut])
            await connection.writer.drain()
            connection.writer.write(asked[cut:])
            assert await connection.status() == 200
            assert b'"count":' in await connection.reader.readuntil(b"}")
        connection.close()


async def asked_by(gateway: Gateway, host: str, *headers: str) -> int:
    lines = "\r\n".join(["POST /tokenize HTTP/1.1", f"host: {host}", *headers, "content-length: 15", "", ""])
    return await status_of(gateway, lines.encode() + b'{"prompt": "x"}')


async def test_a_page_of_a_name_that_points_here_is_not_this_gateways() -> None:
    foreign = ("origin: http://evil.example:8000", "sec-fetch-site: same-origin")
    async with unguarded(allowed_hosts=("chat.example",)) as gateway:
        for host, status in (
            ("evil.example:8000", 421),
            ("evil.example.:8000", 421),
            ("localhost.evil.example", 421),
            ("127.0.0.1.evil.example", 421),
            ("gateway", 421),
            ("", 421),
            ("127.0.0.1:8000", 200),
            ("[::1]:8000", 200),
            ("192.168.1.2", 200),
            ("LOCALHOST", 200),
            ("any.localhost:1", 200),
            ("chat.example:443", 200),
        ):
            assert await asked_by(gateway, host, *foreign) == status, host
            # A token that nobody judges is none.
            assert await asked_by(gateway, host, "authorization: Bearer made-up") == status, host
        for path, status in (("health", 200), ("version", 200), ("metrics", 421), ("v1/models", 421)):
            asked = b"GET /%b HTTP/1.1\r\nhost: evil.example\r\n\r\n" % path.encode()
            assert await status_of(gateway, asked) == status, path


async def test_a_name_without_a_token_is_not_needed_with_one(tmp_path: Path) -> None:
    async with guarded(tmp_path) as gateway:
        assert await asked_by(gateway, "gateway.example", RIGHT) == 200
        assert await asked_by(gateway, "gateway.example", WRONG) == 401


async def test_any_name_may_be_allowed() -> None:
    async with unguarded(allowed_hosts=("*",)) as gateway:
        assert await asked_by(gateway, "evil.example") == 200


async def test_a_token_that_no_header_holds_ends_nobodys_stream(tmp_path: Path) -> None:
    """All calls go over one connection to the router, which ends it for headers that are too large."""
    async with guarded(tmp_path) as gateway:
        stream = await Connection.to(gateway)
        stream.post(CHAT, {"messages": HELLO, "stream": True}, RIGHT)
        assert await stream.status() == 200
        for size in (5_000, 20_000, 65_000):
            asked = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-api-key: %b\r\n\r\n" % (b"a" * size)
            assert await status_of(gateway, asked) == 401
        await stream.reader.readuntil(b"data:")
        assert await status_of(gateway, HEALTH) == 200
        await stream.reader.readuntil(b"data:")
        stream.close()


async def test_what_is_public_admits_nobody(tmp_path: Path) -> None:
    async with guarded(tmp_path, anonymous_connections=8, anonymous_connections_each=4) as gateway:
        many = await connections(gateway, 20, b"GET /options HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await until(lambda: gateway.metric("http_connections_evicted_total") >= 16)
        await until(lambda: gateway.metric("http_connections") <= 4)
        for one in many:
            one.close()


async def test_bodies_that_are_many_end_no_request_that_has_none(tmp_path: Path, monkeypatch: Any) -> None:
    async with unguarded(max_body_bytes=2048, max_bodies_bytes=2048) as gateway:
        client, asked, go_on = gateway.app._router.client, asyncio.Event(), asyncio.Event()
        list_models = type(client).list_models

        async def slow(self: Any) -> Any:
            asked.set()
            await go_on.wait()
            return await list_models(self)

        await gateway.app._callers.admit(None)
        monkeypatch.setattr(type(client), "list_models", slow)
        getting = asyncio.create_task(status_of(gateway, GET + b"host: localhost\r\n\r\n"))
        await asked.wait()
        for _ in range(2):
            connection = await Connection.to(gateway)
            connection.post("/tokenize", {"prompt": "x" * 1500})
            assert await connection.status() == 200
            connection.close()
        go_on.set()
        assert await getting == 200


async def test_strangers_give_way_before_uploads(tmp_path: Path) -> None:
    async with guarded(tmp_path, max_connections=6, anonymous_connections=6) as gateway:
        upload = await Connection.to(gateway)
        upload.writer.write(HALF.replace(b"1000", b"14") % (RIGHT.encode() + b"\r\n"))
        await until(lambda: gateway.metric("http_body_bytes") == 1)
        silent = await connections(gateway, 12)
        await until(lambda: gateway.metric("http_connections_evicted_total") >= 7)
        upload.writer.write(b'"messages":1}')
        assert await upload.status() == 400
        for one in [*silent, upload]:
            one.close()


async def test_a_drain_waits_for_bodies_of_admitted_requests(tmp_path: Path) -> None:
    async with guarded(tmp_path, drain_grace_seconds=60.0) as gateway:
        upload = await Connection.to(gateway)
        upload.writer.write(HALF.replace(b"1000", b"14") % (RIGHT.encode() + b"\r\n"))
        await until(lambda: gateway.metric("http_body_bytes") == 1)
        stopping = asyncio.create_task(gateway.app.stop())
        await until(lambda: gateway.app.is_draining)
        upload.writer.write(b'"messages":1}')
        assert await upload.status() == 400
        await stopping


async def test_a_reader_that_stops_is_cut_off_on_every_route() -> None:
    async with unguarded(stalled_reader_seconds=0.2) as gateway:
        (connection,) = await connections(gateway, 1, b"GET /options HTTP/1.1\r\nhost: localhost\r\n\r\n" * 60)
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: gateway.metric("http_connections") == 1)
        await until(lambda: gateway.metric("http_connections") == 0)
        connection.close()


async def test_handshakes_count_as_work_of_strangers_and_of_their_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(tmp_path, tls_cert=CERT, tls_key=KEY) as gateway:
        everyone = gateway.app._server._everyone
        host, port = gateway.host_port
        tls = ssl.create_default_context(cafile=CA)
        charged: list[float] = []
        charge = everyone.strangers.charge
        gateway.app._server._listeners[0]._arrivals._on_work = lambda seconds: (
            charged.append(seconds),
            charge(seconds),
        )
        assert everyone.handshakes.delay(host) == 0
        for _ in range(100):
            _, writer = await asyncio.open_connection(host, port, ssl=tls, server_hostname="localhost")
            writer.transport.abort()
        # Its begin, and each part.
        assert len(charged) >= 300
        assert everyone.handshakes._now(host) > 0
        # Whoever shows credentials gives its handshake back.
        forgiven: list[str] = []
        monkeypatch.setattr(everyone.handshakes, "forgive", lambda network, seconds: forgiven.append(network))
        for caller in (WRONG, RIGHT):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls, server_hostname="localhost")
            writer.write(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{caller}\r\n\r\n".encode())
            status = (await reader.readline()).split()[1]
            assert (status, forgiven) == ((b"401", []) if caller is WRONG else (b"200", [host]))
            writer.transport.abort()


async def test_tls_of_a_stranger_counts_as_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of one byte takes a microsecond and a half, which no parser sees."""
    ticks = itertools.count()
    async with guarded(tmp_path, tls_cert=CERT, tls_key=KEY, anonymous_cpu_share=0.001) as gateway:
        everyone = gateway.app._server._everyone
        host, port = gateway.host_port
        tls = ssl.create_default_context(cafile=CA)
        _, writer = await asyncio.open_connection(host, port, ssl=tls, server_hostname="localhost")
        assert not everyone.strangers.are_many
        # Not before: its handshake counts, too.
        monkeypatch.setattr("penstock.http2.metered_tls.time", SimpleNamespace(thread_time=lambda: float(next(ticks))))
        writer.write(b"GET /health HTTP/1.1\r\n")
        await until(lambda: everyone.strangers.are_many)
        # It waits for its turn, undecrypted.
        (stranger,) = everyone._all
        assert isinstance(stranger, HttpConnection)
        assert not stranger._own.is_reading()
        writer.transport.abort()
        await until(lambda: not everyone._all)
