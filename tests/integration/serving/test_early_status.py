"""Status that a server sends while its client still sends: what leaves the server, and what clients make of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from factories.servers.transports import Setting
from factories.wire.conformance import REQUEST
from factories.wire.http2 import message
from factories.wire.raw_client import RawClient
from factories.wire.request_fuzz import lost_its_status
from penstock.common.errors import InvalidArgument
from penstock.http2 import frames
from penstock.serving.transport import ServerCall
from penstock.v1 import tokenizer_pb2 as pb

DECODE_STREAM = "/penstock.v1.TokenizerService/DecodeStream"
MESSAGE = pb.DecodeStreamRequest(items=[pb.DecodeStreamItem(stream_id=1)]).SerializeToString()


async def answer_and_refuse(requests: AsyncIterator[Any], call: ServerCall) -> None:
    """Answer the first message and refuse the second."""
    await anext(requests)
    await call.write(pb.DecodeStreamResponse(detokenize_seconds=1.0))
    await anext(requests)
    raise InvalidArgument("items", "must not be these")


@pytest.fixture(params=["grpc", "asyncio"])
async def setting(request: pytest.FixtureRequest) -> AsyncIterator[Setting]:
    async with Setting(request.param).running() as one:
        one.servicer.handle = answer_and_refuse
        yield one


async def test_a_client_that_sends_on_gets_the_status(setting: Setting) -> None:
    """grpc's client of threads, whose messages come when the server has ended the call, and which reads last."""
    over = threading.Event()

    async def handle(requests: AsyncIterator[Any], call: ServerCall) -> None:
        call.when_over(over.set)
        await answer_and_refuse(requests, call)

    setting.servicer.handle = handle

    def messages() -> Iterator[bytes]:
        yield from (MESSAGE, MESSAGE)
        over.wait()
        yield from [MESSAGE] * 50

    def ask() -> grpc.RpcError:
        with grpc.insecure_channel(f"127.0.0.1:{setting.port}") as channel:
            call: Any = channel.stream_stream(DECODE_STREAM)(messages())
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            return caught.value

    error: Any = await asyncio.to_thread(ask)
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "items: must not be these")


async def test_the_client_of_grpc_aio_makes_its_own_status_of_it(setting: Setting) -> None:
    """It is the same with its own server. Once it is mended there, `lost_its_status` and what uses it can go."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{setting.port}") as channel:
        call: Any = channel.stream_stream(DECODE_STREAM)()

        async def write() -> None:
            # The status waits behind the answer, which is not read.
            while True:
                await call.write(MESSAGE)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await write()
        assert lost_its_status(caught.value)
        assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_the_asyncio_transport_sends_status_then_reset_and_goes_on() -> None:
    async with Setting("asyncio").running() as one:
        one.servicer.handle = answer_and_refuse
        fields = [(name, DECODE_STREAM if name == ":path" else value) for name, value in REQUEST]
        head = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, frames.request_headers(fields))
        part = frames.frame(frames.DATA, 0, 1, message(MESSAGE))
        async with RawClient.opened(f"127.0.0.1:{one.port}") as client:
            await client.send(head + part + part)
            assert await client.outcome(1) == ("grpc", grpc.StatusCode.INVALID_ARGUMENT.value[0])
            await client.send(part * 50 + frames.frame(frames.PING, 0, 0, bytes(8)))
            seen = await client.until(frames.PING)
        assert [kind for kind, _, stream, _ in seen if stream == 1] == [frames.RST_STREAM]
        assert client.seen.resets == {1: frames.NO_ERROR}
        assert client.seen.goaway is None
