"""Connections: pings, message sizes, bearer tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers.tiny_service import SERVING, FixedConfig, health_of, tiny
from penstock.common.config import ChannelConfig, ServerConfig
from penstock.http2.channel import Http2Channel
from penstock.serving.channels import open_channel
from penstock.v1 import tokenizer_pb2 as pb
from penstock.v1 import tokenizer_pb2_grpc
from penstock_client import ClientConfig


async def test_a_message_over_the_limit_is_refused() -> None:
    async with tiny(ServerConfig(max_message_bytes=1024)) as (_, _, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTokenizer(pb.GetTokenizerRequest(model="x" * 2000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_pings_on_a_quiet_stream_are_welcome_unless_the_operator_limits_them() -> None:
    """grpc's default (five minutes between pings) ends long quiet streams with GOAWAY too_many_pings."""
    pinging = ChannelConfig(keepalive_seconds=0.1)
    strict_server = ServerConfig(min_ping_interval_seconds=300)
    async with tiny(None, pinging) as (service, _, stub), tiny(strict_server, pinging) as (_, _, strict):
        welcome = asyncio.ensure_future(stub.GetTokenizer(pb.GetTokenizerRequest(model="wait")))
        with pytest.raises(grpc.aio.AioRpcError, match=r"(?i)too.many.pings"):
            await strict.GetTokenizer(pb.GetTokenizerRequest(model="wait"))
        service.servicer.release.set()
        assert (await welcome).vocab_size == 7


async def test_a_peer_that_stops_answering_is_noticed_by_keepalive() -> None:
    config = ChannelConfig(keepalive_seconds=0.1, keepalive_timeout_seconds=0.2)
    async with (
        tiny() as (_, running, _),
        relay(running.address) as (through, freeze),
        open_channel(through, config) as channel,
    ):
        call = await begun(tokenizer_pb2_grpc.TokenizerServiceStub(channel))
        freeze.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_peer_that_is_slow_to_greet_is_waited_for() -> None:
    hello = asyncio.Event()
    async with tiny() as (_, running, _):
        host, port = running.address.rsplit(":", 1)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            to_reader, to_writer = await asyncio.open_connection(host, int(port))
            to_writer.write(await reader.read(65536))
            await hello.wait()
            await asyncio.gather(pass_on(reader, to_writer), pass_on(to_reader, writer))

        slow = await asyncio.start_server(accept, "127.0.0.1", 0)
        address = f"127.0.0.1:{slow.sockets[0].getsockname()[1]}"
        async with slow, open_channel(address, ChannelConfig()) as channel:
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            call = asyncio.ensure_future(stub.GetTokenizer(pb.GetTokenizerRequest()))
            done, _ = await asyncio.wait([call], timeout=0.5)
            assert not done
            hello.set()
            assert (await call).vocab_size == 7


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


async def begun(stub: Any) -> Any:
    """A stream that was answered. Not always the first: on a busy machine a ping's answer may take too long."""
    while True:
        call = stub.DecodeStream()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(pb.DecodeStreamRequest())
            if await call.read():
                return call


@contextlib.asynccontextmanager
async def relay(address: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """(address, freeze): passes bytes on in both directions until `freeze` is set, then keeps silent."""
    freeze = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()
    host, port = address.rsplit(":", 1)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not freeze.is_set():
                writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(host, int(port))
        tasks.update({asyncio.create_task(pump(reader, to_writer)), asyncio.create_task(pump(to_reader, writer))})

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", freeze
    finally:
        server.close()
        for task in tasks:
            task.cancel()


async def test_without_a_good_token_only_health_answers(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("first\nsecond\n")
    (tmp_path / "mine").write_text("second\n")
    (tmp_path / "wrong").write_text("third\n")
    async with tiny(ServerConfig(auth_token_file=str(tmp_path / "tokens"))) as (_, running, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTokenizer(pb.GetTokenizerRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await health_of(running.address) == SERVING
        for name, allowed in (("mine", True), ("wrong", False)):
            config = ChannelConfig(channel_token_file=str(tmp_path / name))
            async with open_channel(running.address, config) as channel:
                call = tokenizer_pb2_grpc.TokenizerServiceStub(channel).GetTokenizer(pb.GetTokenizerRequest())
                code = await call.code()
                assert (code is grpc.StatusCode.OK) is allowed


async def test_a_rotated_token_counts_from_the_next_call(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("old\n")
    channel = ChannelConfig(channel_token_file=str(tmp_path / "mine"))
    (tmp_path / "mine").write_text("new\n")
    async with tiny(ServerConfig(auth_token_file=str(tokens)), channel) as (_, _, stub):
        assert await stub.GetTokenizer(pb.GetTokenizerRequest()).code() is grpc.StatusCode.UNAUTHENTICATED
        (tmp_path / "next").write_text("new\n")
        (tmp_path / "next").replace(tokens)
        assert await stub.GetTokenizer(pb.GetTokenizerRequest()).code() is grpc.StatusCode.OK


@pytest.mark.parametrize("shown", ["Bearer ", "Bearer", "bearer ", " Bearer first", "Bearer first second"])
@pytest.mark.parametrize("server", ["asyncio", "grpc"])
@pytest.mark.parametrize("client", ["asyncio", "grpc"])
async def test_credentials_that_are_none_are_refused_and_the_connection_lives(
    tmp_path: Path, server: Any, client: str, shown: str
) -> None:
    (tmp_path / "tokens").write_text("first\n")
    good = (("authorization", "Bearer first"),)
    config = FixedConfig(auth_token_file=str(tmp_path / "tokens"), transport=server)
    async with tiny(config) as (_, running, _), contextlib.AsyncExitStack() as stack:
        if client == "grpc":
            stubs: Any = await stack.enter_async_context(open_channel(running.address))
        else:
            channel = Http2Channel(running.address, ChannelConfig(), timeout=60.0)
            stack.callback(channel.close)
            stubs = channel.for_stubs
        call = tokenizer_pb2_grpc.TokenizerServiceStub(stubs).GetTokenizer
        await call(pb.GetTokenizerRequest(), metadata=good)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(pb.GetTokenizerRequest(), metadata=(("authorization", shown),))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await call(pb.GetTokenizerRequest(), metadata=good)


@pytest.mark.parametrize("token", ["", " ", "a ", " a", "a\n", "é", "a\tb"])
def test_a_token_that_is_none_is_refused_before_it_is_sent(token: str) -> None:
    with pytest.raises(ValueError, match="token"):
        ClientConfig(token=token).metadata("127.0.0.1:1")
