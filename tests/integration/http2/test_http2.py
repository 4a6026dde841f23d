"""The gRPC server on asyncio: what grpc.aio's clients see, and peers that do not keep to HTTP/2."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import factories.servers.tiny_service
import grpc
import pytest
from factories.servers.tiny_service import SERVING, AsyncioConfig, health_of, tiny
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from penstock.common.config import ChannelConfig
from penstock.common.errors import StartupError
from penstock.http2 import frames
from penstock.serving.channels import open_channel
from penstock.v1 import tokenizer_pb2 as pb
from penstock.v1 import tokenizer_pb2_grpc

FILES = Path(factories.servers.tiny_service.__file__).parent / "tls"
CA, CERT, KEY = str(FILES / "ca.pem"), str(FILES / "server.pem"), str(FILES / "server.key")
LARGE = 3_000_000


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 65_536, LARGE])
@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip], ids=["plain", "gzip"])
async def test_messages_of_every_size_arrive_whole(size: int, compression: grpc.Compression) -> None:
    async with tiny(AsyncioConfig()) as (_, _, stub):
        text = "ab" * (size // 2) + "c" * (size % 2)
        answer = await stub.GetTokenizer(pb.GetTokenizerRequest(model=text), compression=compression)
        assert (answer.model, answer.vocab_size) == (text, 7)


async def test_streams_in_both_directions_at_once() -> None:
    async with tiny(AsyncioConfig()) as (_, _, stub):

        async def one(number: int) -> list[float]:
            async def ask() -> AsyncIterator[pb.DecodeStreamRequest]:
                for count in range(50):
                    yield pb.DecodeStreamRequest(items=[pb.DecodeStreamItem(stream_id=1)] * (number + count % 3))

            return [answer.detokenize_seconds async for answer in stub.DecodeStream(ask())]

        answers = await asyncio.gather(*(one(number) for number in range(20)))
        assert answers == [[number + count % 3 for count in range(50)] for number in range(20)]


async def test_cancelling_and_deadlines_end_the_handler() -> None:
    async with tiny(AsyncioConfig()) as (service, running, stub):
        call = stub.DecodeStream()
        await call.write(pb.DecodeStreamRequest())
        await call.read()
        call.cancel()
        await service.servicer.closed.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTokenizer(pb.GetTokenizerRequest(model="wait"), timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await running.calls.wait_idle()


async def test_health_reflection_and_unknown_methods() -> None:
    async with tiny(AsyncioConfig()) as (_, running, _):
        assert await health_of(running.address) == SERVING
        async with grpc.aio.insecure_channel(running.address) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            answers = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            names = {one.name async for answer in answers for one in answer.list_services_response.service}
            assert "penstock.v1.TokenizerService" in names
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/nobody/knows")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_tls_and_a_client_certificate() -> None:
    known = ChannelConfig(
        channel_tls_ca=CA, channel_tls_cert=str(FILES / "client.pem"), channel_tls_key=str(FILES / "client.key")
    )
    config = AsyncioConfig(tls_cert=CERT, tls_key=KEY, tls_client_ca=CA)
    async with tiny(config, known) as (_, running, stub):
        answer = await stub.GetTokenizer(pb.GetTokenizerRequest(model="x" * LARGE))
        assert len(answer.model) == LARGE
        async with open_channel(running.address, ChannelConfig(channel_tls_ca=CA)) as channel:
            stranger = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stranger.GetTokenizer(pb.GetTokenizerRequest(), timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
async def test_the_address_of_all_interfaces_is_ipv4s_too() -> None:
    async with tiny(AsyncioConfig(host="::", insecure_bind=True)) as (_, running, _):
        port = running.address.rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]"):
            assert await health_of(f"{host}:{port}") == SERVING


@pytest.mark.parametrize("content", ["", "no certificate", "é"])
async def test_a_client_ca_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text(content)
    with pytest.raises(StartupError) as caught:
        async with tiny(AsyncioConfig(tls_cert=CERT, tls_key=KEY, tls_client_ca=str(ca))):
            pass
    assert caught.value.flag == "--tls-client-ca"


async def test_an_encrypted_key_is_refused_without_asking_for_its_password() -> None:
    with pytest.raises(StartupError) as caught:
        async with tiny(AsyncioConfig(tls_cert=CERT, tls_key=str(FILES / "encrypted.key"))):
            pass
    assert caught.value.flag == "--tls-cert"


def _open(stream: int, headers: bytes = b"") -> bytes:
    """HEADERS of a GetTokenizer call that never ends its request."""
    path = b"/penstock.v1.TokenizerService/GetTokenizer"
    block = b"\x83\x86\x04" + bytes((len(path),)) + path + b"\x0f\x10\x10application/grpc" + headers
    return frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block)


def _reset(stream: int) -> bytes:
    return frames.frame(frames.RST_STREAM, 0, stream, struct.pack(">I", frames.CANCEL))


HELLO = frames.PREFACE + frames.settings(())
PINGED = frames.frame(frames.PING, 0, 0, bytes(8))
MISBEHAVIOUR: dict[str, bytes | Callable[[], bytes]] = {
    "not http2": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no frame": HELLO + b"\xff" * 4096,
    "large frame": HELLO + frames.frame(frames.DATA, 0, 1, b"x" * 20_000),
    "data of no stream": HELLO + frames.frame(frames.DATA, 0, 7, b"x"),
    "even stream": HELLO + _open(2),
    "padding": HELLO + _open(1) + frames.frame(frames.DATA, frames.PADDED, 1, b"\x09x"),
    "headers that are no hpack": HELLO
    + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
    "headers without end": HELLO
    + frames.frame(frames.HEADERS, 0, 1, b"\x83")
    + frames.frame(frames.CONTINUATION, 0, 1, b"\x00\x01a\x01b" * 3000) * 10,
    "interrupted headers": HELLO
    + frames.frame(frames.HEADERS, 0, 1, b"\x83")
    + frames.frame(frames.PING, 0, 0, bytes(8)),
    "headers that grow": HELLO + _open(1, b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000 + b"\xbe" * 12_000),
    # Made where it is sent: every worker reads this file.
    "rapid resets": lambda: HELLO + b"".join(_open(1 + 2 * n) + _reset(1 + 2 * n) for n in range(100_000)),
    "pings": HELLO + PINGED * 10_000,
    "settings": HELLO + frames.settings(()) * 10_000,
    "empty data": HELLO + _open(1) + frames.frame(frames.DATA, 0, 1) * 10_000,
    "window overflow": HELLO + frames.frame(frames.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"),
    "push": HELLO + frames.frame(frames.PUSH_PROMISE, frames.END_HEADERS, 1, bytes(8)),
}


@pytest.mark.parametrize("name", list(MISBEHAVIOUR))
async def test_a_peer_that_breaks_the_protocol_is_hung_up_on_and_no_other_notices(name: str) -> None:
    async with tiny(AsyncioConfig(), ChannelConfig()) as (_, running, stub):
        host, _, port = running.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = MISBEHAVIOUR[name]
        writer.write(sent if isinstance(sent, bytes) else sent())
        # The end of the connection, by whatever means.
        received = await asyncio.gather(_read_all(reader), return_exceptions=True)
        writer.close()
        assert received is not None
        assert (await stub.GetTokenizer(pb.GetTokenizerRequest())).vocab_size == 7
        await running.calls.wait_idle()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    received = b""
    while data := await reader.read(65536):
        received += data
    return received


async def test_a_client_that_dies_ends_its_calls() -> None:
    async with tiny(AsyncioConfig()) as (service, running, _):
        channel = grpc.aio.insecure_channel(running.address)
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        waiting = asyncio.ensure_future(stub.GetTokenizer(pb.GetTokenizerRequest(model="wait")))
        await service.servicer.entered.wait()
        await channel.close()
        await asyncio.gather(waiting, return_exceptions=True)
        await running.calls.wait_idle()
