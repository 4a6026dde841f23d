"""Channels to tokenizer and backends, of the transport that is configured."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.router.config import RouterConfig
from penstock.serving.channels import open_channel


@contextlib.asynccontextmanager
async def channel_to(address: str, config: RouterConfig) -> AsyncIterator[grpc.aio.Channel]:
    """For calls of one request; they end with the block. `address`: host:port.

    Raises StartupError when a TLS or token file cannot be read.
    """
    if not config.is_asyncio:
        channel = open_channel(address, config)
        try:
            yield channel
        finally:
            await channel.close(None)
        return
    from penstock.http2.channel import Http2Channel

    own = Http2Channel(address, config, timeout=config.connect_timeout_seconds)
    try:
        yield cast("grpc.aio.Channel", own)
    finally:
        own.close()


async def watch_health(channel: grpc.aio.Channel, service: str) -> AsyncGenerator[bool, None]:
    """Whether it serves, now and whenever that changes; close it when it is not read to its end."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
    try:
        async for update in call:
            yield update.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        call.cancel()


async def until_serving(channel: grpc.aio.Channel, service: str) -> bool:
    """Return True once it serves; False when its health ends."""
    async with contextlib.aclosing(watch_health(channel, service)) as updates:
        async for is_serving in updates:
            if is_serving:
                return True
    return False
