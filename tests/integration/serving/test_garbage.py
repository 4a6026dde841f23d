"""Calls that are over leave nothing of the server's to the garbage collector.

A collection of what ten thousand calls left stops a busy router for a second, and all of them are ended then.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest
from factories.servers.router import until
from factories.servers.transports import Setting
from penstock.common.errors import InvalidArgument
from penstock.v1 import tokenizer_pb2 as pb

DECODE_STREAM = "/penstock.v1.TokenizerService/DecodeStream"
CALLS, FEW = 20, 2
# What holds a call: by name, since grpc's own are not public.
OF_A_CALL = {"_ServicerContext", "RPCState", "GrpcServerCall", "Call"}


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Let nothing be freed but by its count of references."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def kept() -> Counter[str]:
    """Count what is there and holds a call."""
    return Counter(name for name in (type(one).__name__ for one in gc.get_objects()) if name in OF_A_CALL)


async def refuse(request: Any, call: Any) -> Any:
    raise InvalidArgument("model", "must not be this")


async def refuse_stream(requests: AsyncIterator[Any], call: Any) -> None:
    await anext(requests)
    raise InvalidArgument("items", "must not be these")


async def stand_still(request: Any, call: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("transport", ["grpc", "asyncio"])
@pytest.mark.parametrize("handle", [None, refuse, stand_still], ids=["answered", "refused", "late"])
async def test_unary_calls_keep_nothing(transport: str, handle: Any) -> None:
    timeout = 0.1 if handle is stand_still else 20.0
    async with Setting(transport).running() as setting:
        if handle is not None:
            setting.servicer.handle = handle

        async def ask() -> None:
            with contextlib.suppress(grpc.RpcError):
                await setting.stub.GetTokenizer(pb.GetTokenizerRequest(model="one"), timeout=timeout)

        await _keeps_nothing(ask)


@pytest.mark.parametrize("transport", ["grpc", "asyncio"])
async def test_refused_streams_keep_nothing(transport: str) -> None:
    async with Setting(transport).running() as setting:
        setting.servicer.handle = refuse_stream
        message = pb.DecodeStreamRequest(items=[pb.DecodeStreamItem(stream_id=1)])

        async def ask() -> None:
            call: Any = await setting.channel.open_stream(DECODE_STREAM, pb.DecodeStreamResponse.FromString)
            with contextlib.suppress(grpc.RpcError):
                await call.write(message)
                await call.receive()
            call.cancel()

        await _keeps_nothing(ask)


async def _keeps_nothing(ask: Callable[[], Awaitable[None]]) -> None:
    """Make calls one after the other: without a collection hardly one of them is kept."""
    await ask()
    with without_collections():
        before = kept()
        for _ in range(CALLS):
            await ask()
        # The last handlers may not have ended yet.
        await until(lambda: max((kept() - before).values(), default=0) <= FEW)
