"""Reading and awaiting the load of generation processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from penstock.v1 import admin_pb2, admin_pb2_grpc


def is_idle(load: admin_pb2.Load) -> bool:
    """True when nothing waits or runs, and every block is free or holds no more than a reusable prefix."""
    free = load.kv_blocks_free + load.kv_blocks_evictable
    return load.waiting_requests == load.running_requests == load.kv_blocks_used == 0 and free == load.kv_blocks_total


# Time that a condition has to come true; the tests end as soon as it does.
PATIENCE_SECONDS = 60.0


async def wait_load(address: str, condition: Callable[[admin_pb2.Load], bool]) -> admin_pb2.Load:
    """Wait for and return the first load of the process at `address` that meets `condition`. Raises TimeoutError."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = admin_pb2_grpc.GenerationAdminServiceStub(channel)
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for response in stub.WatchLoad(admin_pb2.WatchLoadRequest(min_interval_seconds=0.02)):
                if condition(response.load):
                    return response.load
    raise ConnectionError(f"{address} ended WatchLoad")


async def steps_of(*addresses: str) -> list[int]:
    """Return the engine steps so far of each process, read when it is idle."""
    return [(await wait_load(address, is_idle)).step for address in addresses]
