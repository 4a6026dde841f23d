"""Callers without a token, on both transports: they hold no place, no memory and no shutdown up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import factories.servers.tiny_service
import grpc
import pytest
from factories.servers.router import PATIENCE_SECONDS, until
from factories.servers.tiny_service import NOT_SERVING, SERVING, FixedConfig, TinyService, health_of, tiny
from factories.wire.conformance import HELLO, PATH, REQUEST, body, data, head, replaced
from factories.wire.raw_client import RawClient
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.config import ChannelConfig, ServerConfig
from penstock.common.errors import Unauthenticated, from_rpc_error
from penstock.http2 import frames
from penstock.serving.channels import open_channel
from penstock.serving.server import RunningServer
from penstock.v1 import tokenizer_pb2 as pb

UNAUTHENTICATED, RESOURCE_EXHAUSTED = (
    grpc.StatusCode.UNAUTHENTICATED.value[0],
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0],
)
FILES = Path(factories.servers.tiny_service.__file__).parent / "tls"
CERT, KEY, CA = (str(FILES / name) for name in ("server.pem", "server.key", "ca.pem"))
TRANSPORTS = pytest.mark.parametrize("transport", ["asyncio", "grpc"])
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
EMPTY = b"\0\0\0\0\0"


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text("open sesame\n")
    return str(path)


@contextlib.asynccontextmanager
async def guarded(transport: Any, tokens: str, **options: Any) -> AsyncIterator[tuple[TinyService, RunningServer, Any]]:
    config = FixedConfig(transport=transport, auth_token_file=tokens, **options)
    async with tiny(config, ChannelConfig(channel_token_file=tokens)) as found:
        yield found


def watch(stream: int, **headers: Any) -> bytes:
    return head(replaced(":path", WATCH), stream=stream) + data(EMPTY, stream=stream)


@TRANSPORTS
async def test_a_call_without_a_token_is_refused_before_its_request_has_come(transport: str, tokens: str) -> None:
    async with guarded(transport, tokens) as (_, running, _), RawClient.opened(running.address) as client:
        for stream in (1, 3):
            # The head of a large message, and no more.
            more = data(b"\0\0\x30\0\0", stream=stream, flags=0) if stream == 3 else b""
            await client.send(head(stream=stream) + more)
            assert await client.outcome(stream) == ("grpc", UNAUTHENTICATED)
        assert running.calls.in_flight == 0


@TRANSPORTS
async def test_the_refusal_says_why_and_is_counted(transport: str, tokens: str) -> None:
    async with guarded(transport, tokens) as (_, running, _), open_channel(running.address) as channel:
        ask = channel.unary_unary(PATH, pb.GetTokenizerRequest.SerializeToString)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(pb.GetTokenizerRequest(), metadata=(("x-request-id", "mine"),))
        error = from_rpc_error(caught.value)
        assert (type(error), error.reason) == (Unauthenticated, "UNAUTHENTICATED")
        assert dict(caught.value.trailing_metadata() or ())["x-request-id"] == "mine"
        labels = {"grpc_method": "GetTokenizer", "grpc_code": "UNAUTHENTICATED"}
        samples = [sample for family in running.registry.collect() for sample in family.samples]
        counted = [one.value for one in samples if labels.items() <= one.labels.items()]
        assert 1.0 in counted


@pytest.mark.slow
@TRANSPORTS
async def test_watches_of_one_connection_leave_places_for_others(transport: str, tokens: str) -> None:
    async with guarded(transport, tokens) as (_, running, stub), RawClient.opened(running.address) as client:
        many = 600
        for first in range(1, 2 * many, 200):
            await client.send(b"".join(watch(stream) for stream in range(first, first + 200, 2)))
        assert await client.outcome(2 * many - 1) == ("grpc", RESOURCE_EXHAUSTED)
        assert 1 not in client.seen.status
        assert await health_of(running.address) == SERVING
        assert (await stub.GetTokenizer(pb.GetTokenizerRequest())).vocab_size == 7


@TRANSPORTS
async def test_watches_of_many_connections_make_room_for_whoever_asks(transport: str, tokens: str) -> None:
    options = {"anonymous_rpcs": 20}
    async with guarded(transport, tokens, **options) as (_, running, stub), contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RawClient.opened(running.address)) for _ in range(4)]
        for client in clients:
            await client.send(b"".join(watch(stream) for stream in range(1, 20, 2)))
            await client.first_data(19)
        assert await clients[0].outcome(1) == ("grpc", RESOURCE_EXHAUSTED)
        assert await health_of(running.address) == SERVING
        assert (await stub.GetTokenizer(pb.GetTokenizerRequest())).vocab_size == 7


@TRANSPORTS
async def test_a_health_request_of_megabytes_is_refused(transport: str, tokens: str) -> None:
    large = health_pb2.HealthCheckRequest(service="a" * (1 << 20))
    async with guarded(transport, tokens) as (_, running, _), open_channel(running.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as caught:
            await stub.Check(large)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
            await anext(aiter(stub.Watch(large)))


@TRANSPORTS
async def test_requests_that_never_come_end(transport: str, tokens: str) -> None:
    options = {"handshake_seconds": 1.0, "request_seconds": 0.2}
    # Sent at once, so that the handshake is in time however slow the machine is.
    begun = head(replaced(":path", CHECK)) + head([*REQUEST, ("authorization", "Bearer open sesame")], stream=3)
    async with (
        guarded(transport, tokens, **options) as (_, running, _),
        RawClient.opened(running.address, HELLO + begun) as client,
    ):
        deadline = ("grpc", grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
        assert {await client.outcome(1), await client.outcome(3)} == {deadline}
        await running.calls.wait_idle()


@TRANSPORTS
async def test_one_connection_does_not_take_all_calls_where_no_token_is_asked_for(transport: str) -> None:
    config = FixedConfig(transport=transport, max_concurrent_rpcs=40, connection_rpcs=20)
    async with tiny(config) as (_, running, stub), RawClient.opened(running.address) as client:
        await client.send(b"".join(head(stream=stream) for stream in range(1, 400, 2)))
        assert (await client.outcome(399))[0] in ("stream", "grpc", "connection")
        assert (await stub.GetTokenizer(pb.GetTokenizerRequest())).vocab_size == 7


@TRANSPORTS
async def test_a_watcher_that_does_not_read_holds_up_neither_others_nor_the_end(transport: str) -> None:
    service = TinyService()
    running = RunningServer(service, ServerConfig(transport=transport, metrics_port=0))  # type: ignore[arg-type]
    await running.listen()
    await running.start()
    # It opens no window: nothing of an answer may be sent.
    silent = frames.PREFACE + frames.settings(((frames.INITIAL_WINDOW_SIZE, 0),))
    async with RawClient.opened(running.address, silent) as client, open_channel(running.address) as channel:
        await client.send(watch(1))
        other = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await other.read()).status == SERVING
        # The silent one began before the other was answered; only grpc's threads may be later.
        await running.health.set_up(False)
        assert (await other.read()).status == NOT_SERVING
        await running.health.set_up(True)
        assert (await other.read()).status == SERVING
        await asyncio.wait_for(running.stop(), 60)


@TRANSPORTS
async def test_health_of_all_services_is_listed(transport: str) -> None:
    async with tiny(FixedConfig(transport=transport)) as (_, running, _), open_channel(running.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
        assert {name: one.status for name, one in answer.statuses.items()} == {
            "": SERVING,
            "penstock.v1.TokenizerService": SERVING,
        }


async def test_of_too_many_connections_without_a_token_an_idle_one_goes(tokens: str) -> None:
    async with guarded("asyncio", tokens, anonymous_connections=3) as (_, running, stub):
        assert (await stub.GetTokenizer(pb.GetTokenizerRequest())).vocab_size == 7
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(RawClient.opened(running.address)) for _ in range(3)]
            await clients[0].send(watch(1))
            await clients[0].first_data(1)
            late = await stack.enter_async_context(RawClient.opened(running.address))
            assert await clients[1].outcome(1) == ("connection", frames.ENHANCE_YOUR_CALM)
            await late.send(watch(1))
            assert await late.first_data(1)
        # The caller with a token is none of them.
        assert (await stub.GetTokenizer(pb.GetTokenizerRequest())).vocab_size == 7


async def test_of_too_many_tls_handshakes_the_oldest_are_given_up() -> None:
    patient = FixedConfig(
        transport="asyncio", tls_cert=CERT, tls_key=KEY, anonymous_connections=4, handshake_seconds=3600.0
    )
    async with tiny(patient, ChannelConfig(channel_tls_ca=CA)) as (_, running, stub):
        host, _, port = running.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
        for reader, _ in silent[:8]:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b""
        assert (await stub.GetTokenizer(pb.GetTokenizerRequest())).vocab_size == 7
        assert not silent[-1][0].at_eof()
        for _, writer in silent:
            writer.close()


@TRANSPORTS
async def test_a_connection_that_never_begins_is_closed(transport: str) -> None:
    config = FixedConfig(transport=transport, handshake_seconds=0.2)
    async with tiny(config) as (_, running, _), RawClient.opened(running.address, HELLO[:10]) as client:
        assert (await client.outcome(1))[0] == "connection"


async def test_floods_wait_and_probes_do_not(tokens: str) -> None:
    """A stranger's frames beyond its share stay unread; another's health check is answered before they are."""
    async with (
        guarded("asyncio", tokens, anonymous_cpu_share=0.001) as (_, running, stub),
        RawClient.opened(running.address) as flood,
    ):
        sending = asyncio.ensure_future(flood.send(4_000_000 * frames.window_update(0, 1)))
        for _ in range(20):
            assert await health_of(running.address) == SERVING
            assert (await stub.GetTokenizer(pb.GetTokenizerRequest())).vocab_size == 7
        assert not sending.done()
        sending.cancel()


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux tells that an unread peer has gone")
async def test_tls_of_a_stranger_counts_as_its_work(tokens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("penstock.http2.metered_tls.time", SimpleNamespace(thread_time=lambda: float(next(ticks))))
    config = FixedConfig(
        transport="asyncio", auth_token_file=tokens, tls_cert=CERT, tls_key=KEY, anonymous_cpu_share=0.001
    )
    async with tiny(config) as (_, running, _):
        host, _, port = running.address.rpartition(":")
        tls = ssl.create_default_context(cafile=CA)
        tls.set_alpn_protocols(["h2"])
        _, writer = await asyncio.open_connection(host, int(port), ssl=tls, server_hostname="localhost")
        strangers = running._server._strangers  # type: ignore[attr-defined]
        assert not strangers.are_many
        writer.write(HELLO[:5])
        await until(lambda: strangers.are_many)
        writer.transport.abort()
        await until(lambda: not len(strangers))


async def test_a_flood_ends_with_its_connection(tokens: str) -> None:
    """Bytes that came before it hung up, and were not looked at, are not worked for."""
    update = frames.window_update(0, 1)
    async with guarded("asyncio", tokens, anonymous_cpu_share=0.001) as (_, running, _):
        server: Any = running._server

        def has_left_much() -> bool:
            return server._strangers.are_many and any(len(one._received) > 50_000 for one in server._connections)

        async with RawClient.opened(running.address) as flood:
            sending = asyncio.ensure_future(flood.send(400_000 * update))
            await until(has_left_much)
            sending.cancel()
            flood.hang_up()
            (connection,) = server._connections
            left, before = len(connection._received) // len(update), connection.flow.window
            await until(lambda: not server._connections)
        assert connection.flow.window - before < left / 2


async def test_a_connection_is_trusted_once_a_call_was_admitted(tokens: str) -> None:
    async with guarded("asyncio", tokens) as (_, running, _), RawClient.opened(running.address) as client:
        server: Any = running._server
        await until(lambda: len(server._strangers) == 1)
        fields = [*REQUEST, ("authorization", "Bearer open sesame")]
        await client.send(head(fields) + data(body()))
        assert await client.outcome(1) == ("grpc", 0)
        assert len(server._strangers) == 0
