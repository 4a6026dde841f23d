"""Small requests that would become large: a router process stays small and answers others meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import psutil
import pytest
from factories.servers.stack import Process, start
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.errors import InvalidArgument, from_rpc_error

# An empty message of a Chat, two million times: 4 kB as gzip.
EMPTY_MESSAGES = b"\x12\x00" * 2_000_000
MOST_BYTES = 64 << 20
# Of one health check, on any machine: that of a router that makes the messages waits for all of them.
MOST_SECONDS = 60.0


def channel(process: Process) -> grpc.aio.Channel:
    # The client may send more than the router takes.
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
    return grpc.aio.insecure_channel(process.address, options=options)


async def refusal(process: Process, body: bytes, method: str = "Chat") -> grpc.aio.AioRpcError:
    async with channel(process) as to:
        call: Any = to.unary_stream(f"/penstock.v1.TextService/{method}")(body, compression=grpc.Compression.Gzip)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        return caught.value


async def listening(process: Process) -> None:
    """It listens before it is ready, and need not be."""
    async with channel(process) as to:
        await health_pb2_grpc.HealthStub(to).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=300)


async def slowest_health(process: Process, until: asyncio.Event) -> float:
    slowest, clock = 0.0, asyncio.get_running_loop().time
    async with channel(process) as to:
        stub = health_pb2_grpc.HealthStub(to)
        while not until.is_set():
            began = clock()
            await stub.Check(health_pb2.HealthCheckRequest())
            slowest = max(slowest, clock() - began)
    return slowest


async def peak_memory(process: Process, until: asyncio.Event) -> int:
    peak, watched = 0, psutil.Process(process.popen.pid)
    while not until.is_set():
        peak = max(peak, watched.memory_info().rss)
        await asyncio.sleep(0.005)
    return peak


@pytest.mark.parametrize("transport", ["asyncio", pytest.param("grpc", marks=pytest.mark.slow)])
async def test_millions_of_empty_messages_are_refused_before_they_are_made(transport: str) -> None:
    process = start("router", "--transport", transport, "--start-timeout-seconds", "600")
    try:
        await listening(process)
        before, over = psutil.Process(process.popen.pid).memory_info().rss, asyncio.Event()
        health = asyncio.create_task(slowest_health(process, over))
        memory = asyncio.create_task(peak_memory(process, over))
        for error in await asyncio.gather(*(refusal(process, EMPTY_MESSAGES) for _ in range(8))):
            raised = from_rpc_error(error)
            assert isinstance(raised, InvalidArgument)
            assert (raised.field, raised.reason) == ("messages", "TOO_MANY")
        # 5 MB as gzip would be 5 GB: it is not unpacked beyond the bound.
        assert (await refusal(process, bytes(200 << 20))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        over.set()
        assert await memory - before < MOST_BYTES
        assert await health < MOST_SECONDS
    finally:
        process.kill()
        process.log.unlink()
