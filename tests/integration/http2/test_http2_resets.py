"""Clients that cancel: the honest ones with thousands of calls, and the rapid reset of CVE-2023-44487."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from factories.servers.router import until
from factories.servers.tiny_service import AsyncioConfig, tiny
from hpack import Encoder
from penstock.common.config import ChannelConfig
from penstock.http2 import frames
from penstock.http2.channel import Http2Channel
from penstock.serving.channels import open_channel
from penstock.v1 import tokenizer_pb2 as pb
from penstock.v1 import tokenizer_pb2_grpc

WAIT = pb.GetTokenizerRequest(model="wait")


def channel_to(kind: str, address: str) -> Any:
    """One connection."""
    return open_channel(address) if kind == "grpc" else Http2Channel(address, ChannelConfig(), timeout=60.0)


@pytest.mark.parametrize("kind", ["grpc", "asyncio"])
async def test_whoever_has_many_calls_may_cancel_them_all_at_once(kind: str) -> None:
    many = 500
    # However few idle frames are allowed: what may be in flight may be cancelled.
    config = AsyncioConfig(max_concurrent_rpcs=many, idle_frames=16, idle_frames_per_second=0.0)
    async with tiny(config) as (service, running, _):
        channel = channel_to(kind, running.address)
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        bystander = asyncio.ensure_future(stub.GetTokenizer(WAIT))
        await service.servicer.entered.wait()
        calls = [asyncio.ensure_future(stub.GetTokenizer(WAIT)) for _ in range(many - 1)]
        await until(lambda: running.calls.in_flight == many or bystander.done())
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: running.calls.in_flight == 1 or bystander.done())
        service.servicer.release.set()
        assert (await bystander).vocab_size == 7
        closing = channel.close()
        if closing is not None:
            await closing


@pytest.mark.parametrize("kind", ["grpc", "asyncio"])
async def test_a_client_that_resets_without_end_is_cut_off_with_a_reason(kind: str) -> None:
    few = 8
    config = AsyncioConfig(max_concurrent_rpcs=2 * few, idle_frames=16, idle_frames_per_second=0.0)
    async with tiny(config) as (service, running, _):
        channel = channel_to(kind, running.address)
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        bystander = asyncio.ensure_future(stub.GetTokenizer(WAIT))
        await service.servicer.entered.wait()
        while not bystander.done():
            calls = [asyncio.ensure_future(stub.GetTokenizer(WAIT)) for _ in range(few)]
            await until(lambda: running.calls.in_flight > few or bystander.done())
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await until(lambda: running.calls.in_flight <= 1)
        # grpc's client may find its connection closed when it writes, before it reads why.
        told = "too many early resets of calls without an answer" if kind == "asyncio" else None
        with pytest.raises(grpc.aio.AioRpcError, match=told) as caught:
            await bystander
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        closing = channel.close()
        if closing is not None:
            await closing


def frames_of(call: int, path: str, *, reset: bool, encoder: Encoder) -> bytes:
    """A call with an empty message, and perhaps its reset."""
    headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
    block = encoder.encode([*headers, ("te", "trailers"), ("content-type", "application/grpc")])
    body = frames.frame(frames.DATA, frames.END_STREAM, call, bytes(frames.MESSAGE_HEAD))
    sent = frames.header_frames(call, block, end=False, limit=frames.DEFAULT_FRAME_SIZE) + body
    return sent + (frames.reset(call, frames.CANCEL) if reset else b"")


async def test_calls_that_were_reset_hold_no_slot_of_others() -> None:
    """More of them than there are slots come in one read, and a call behind them is served."""
    path = "/penstock.v1.TokenizerService/GetTokenizer"
    many = 2 * AsyncioConfig().anonymous_rpcs
    config = AsyncioConfig(max_concurrent_rpcs=4, idle_frames=4 * many)
    async with tiny(config) as (_, running, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", running.addresses.grpc.rpartition(":")[2])
        encoder = Encoder()
        sent = frames.PREFACE + frames.settings(())
        for call in range(1, 2 * many, 2):
            sent += frames_of(call, path, reset=True, encoder=encoder)
        writer.write(sent + frames_of(2 * many + 1, path, reset=False, encoder=encoder))
        kinds: list[int] = []
        ended = False
        while not ended:
            head = await reader.readexactly(frames.FRAME_HEAD)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            if int.from_bytes(head[5:], "big") == 2 * many + 1:
                kinds.append(head[3])
                ended = bool(head[4] & frames.END_STREAM)
        # A refusal would have no message.
        assert frames.DATA in kinds
        writer.close()
