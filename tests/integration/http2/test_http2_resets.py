"""Clients that cancel: the honest ones with thousands of calls, and the rapid reset of CVE-2023-44487."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from factories.router import until
from factories.tiny_service import AsyncioConfig, tiny
from penstock.common.config import ChannelConfig
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
