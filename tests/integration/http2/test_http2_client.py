"""Streams of the asyncio transport to real servers: grpc.aio's and our own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import factories.servers.tiny_service
import grpc
import pytest
from factories.servers.tiny_service import FixedConfig, tiny
from penstock.common.config import ChannelConfig
from penstock.common.errors import StartupError
from penstock.http2.client_stream import ClientStreamCall
from penstock.serving.transport import Http2Transport
from penstock.v1.tokenizer_pb2 import DecodeStreamItem, DecodeStreamRequest, DecodeStreamResponse

FILES = Path(factories.servers.tiny_service.__file__).parent / "tls"
CA, CERT, KEY = str(FILES / "ca.pem"), str(FILES / "server.pem"), str(FILES / "server.key")
CLIENT = {"channel_tls_cert": str(FILES / "client.pem"), "channel_tls_key": str(FILES / "client.key")}
TRANSPORTS: Any = pytest.mark.parametrize("transport", ["grpc", "asyncio"])


DECODE_STREAM = "/penstock.v1.TokenizerService/DecodeStream"


async def dial(
    address: str, config: ChannelConfig | None = None, method: str = DECODE_STREAM
) -> ClientStreamCall[DecodeStreamResponse]:
    opened = Http2Transport().open_channel(address, config or ChannelConfig(), connect_timeout_seconds=10.0)
    async with opened as channel:
        call: Any = await channel.open_stream(method, DecodeStreamResponse.FromString)
    return call


def items(count: int, stream_id: int = 1) -> DecodeStreamRequest:
    return DecodeStreamRequest(items=[DecodeStreamItem(stream_id=stream_id)] * count)


async def count(call: Any) -> float:
    """Items that the server saw in a message."""
    read = await call.read()
    return float(read.detokenize_seconds)


@TRANSPORTS
async def test_messages_of_every_size_go_there_and_back_in_order(transport: Any) -> None:
    async with tiny(FixedConfig(transport=transport, max_message_fields=1 << 22)) as (_, running, _):
        call = await dial(running.address)
        sizes = [0, 1, 4090, 4096, 100_000, 3, 700_000, *range(50)]

        async def write() -> None:
            for size in sizes:
                await call.write(items(size))

        async def read() -> list[float]:
            return [await count(call) for _ in sizes]

        _, counts = await asyncio.gather(write(), read())
        assert counts == sizes
        call.cancel()


@TRANSPORTS
async def test_cancelling_ends_the_handler(transport: Any) -> None:
    async with tiny(FixedConfig(transport=transport)) as (service, running, _):
        call = await dial(running.address)
        await call.write(items(2))
        assert await count(call) == 2
        call.cancel()
        await service.servicer.closed.wait()


@TRANSPORTS
async def test_mutual_tls_and_a_token(transport: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    token = str(tmp_path / "token")
    config = FixedConfig(transport=transport, tls_cert=CERT, tls_key=KEY, tls_client_ca=CA, auth_token_file=token)
    async with tiny(config, ChannelConfig(channel_tls_ca=CA, **CLIENT)) as (_, running, _):
        call = await dial(running.address, ChannelConfig(channel_tls_ca=CA, channel_token_file=token, **CLIENT))
        await call.write(items(30_000))
        assert await count(call) == 30_000
        call.cancel()
        call = await dial(running.address, ChannelConfig(channel_tls_ca=CA, **CLIENT))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@TRANSPORTS
@pytest.mark.parametrize("channel", [ChannelConfig(), ChannelConfig(channel_tls=True)], ids=["plaintext", "other CAs"])
async def test_a_server_that_cannot_be_trusted_or_read_is_unavailable(transport: Any, channel: ChannelConfig) -> None:
    config = FixedConfig(transport=transport, tls_cert=CERT, tls_key=KEY)
    async with tiny(config, ChannelConfig(channel_tls_ca=CA)) as (_, running, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (await dial(running.address, channel)).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_silent_server_is_given_up() -> None:
    async def never(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await closed.wait()
        writer.close()

    closed = asyncio.Event()
    server = await asyncio.start_server(never, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    call = await dial(f"{host}:{port}", ChannelConfig(keepalive_seconds=0.05, keepalive_timeout_seconds=0.05))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    closed.set()
    server.close()


@TRANSPORTS
async def test_a_quiet_stream_lives_by_its_pings(transport: Any) -> None:
    async with tiny(FixedConfig(transport=transport, min_ping_interval_seconds=0.01)) as (_, running, _):
        call = await dial(running.address, ChannelConfig(keepalive_seconds=0.05, keepalive_timeout_seconds=1.0))
        reading = asyncio.ensure_future(count(call))
        answers: set[float] = set()
        while len(answers) < 4:
            answers.add(call._keepalive._active_at)
            await asyncio.sleep(0.01)
        await call.write(items(3))
        assert await reading == 3
        call.cancel()


@pytest.mark.parametrize("field", ["channel_tls_ca", "channel_tls_cert", "channel_token_file"])
async def test_files_that_are_not_there_are_named(field: str) -> None:
    with pytest.raises(StartupError) as caught:
        await dial("127.0.0.1:1", ChannelConfig(**{field: "/no/such/file"}))
    assert caught.value.flag == f"--{field.replace('_', '-')}"
