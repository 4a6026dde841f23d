"""Calls of one request of the asyncio transport to real servers: grpc.aio's and our own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers.tiny_service import FixedConfig, TinyService, tiny
from penstock.common.config import ChannelConfig, ServerConfig
from penstock.common.errors import InvalidArgument, from_rpc_error
from penstock.serving.server import RunningServer
from penstock.serving.transport import Http2Transport
from penstock.v1 import tokenizer_pb2 as pb
from penstock.v1 import tokenizer_pb2_grpc

TRANSPORTS: Any = pytest.mark.parametrize("transport", ["grpc", "asyncio"])


@contextlib.asynccontextmanager
async def channel_to(address: str, config: ChannelConfig | None = None) -> AsyncIterator[tuple[Any, Any]]:
    """A stub and the channel that it calls by."""
    opened = Http2Transport().open_channel(address, config or ChannelConfig(), connect_timeout_seconds=10.0)
    async with opened as channel:
        yield tokenizer_pb2_grpc.TokenizerServiceStub(channel.for_stubs), channel


@contextlib.asynccontextmanager
async def served(
    config: ServerConfig, channel: ChannelConfig | None = None
) -> AsyncIterator[tuple[TinyService, RunningServer, Any, Any]]:
    async with tiny(config) as (service, running, _), channel_to(running.address, channel) as (stub, opened):
        yield service, running, stub, opened


def ask(model: str) -> pb.GetTokenizerRequest:
    return pb.GetTokenizerRequest(model=model)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


@TRANSPORTS
async def test_each_of_many_calls_gets_its_own_answer(transport: Any) -> None:
    async with served(FixedConfig(transport=transport)) as (_, _, stub, _):
        names = [f"model {place}" * (1 + place % 7) for place in range(300)]
        answers = await asyncio.gather(*(stub.GetTokenizer(ask(name)) for name in names))
        assert [answer.model for answer in answers] == names


@TRANSPORTS
@pytest.mark.parametrize("size", [0, 16_379, 16_380, 100_000, 3_000_000])
async def test_messages_of_every_size_go_there_and_back(transport: Any, size: int) -> None:
    async with served(FixedConfig(transport=transport)) as (_, _, stub, _):
        answers = await asyncio.gather(*(stub.GetTokenizer(ask("x" * size), timeout=60) for _ in range(3)))
        assert [len(answer.model) for answer in answers] == [size] * 3


@TRANSPORTS
async def test_the_deadline_ends_a_call_here_and_there(transport: Any) -> None:
    async with served(FixedConfig(transport=transport)) as (_, running, stub, _):
        assert await code_of(stub.GetTokenizer(ask("wait"), timeout=0.05)) is grpc.StatusCode.DEADLINE_EXCEEDED
        await running.calls.wait_idle()
        assert await code_of(stub.GetTokenizer(ask("late"), timeout=0.0)) is grpc.StatusCode.DEADLINE_EXCEEDED


@TRANSPORTS
async def test_a_cancelled_call_is_cancelled_at_the_server(transport: Any) -> None:
    async with served(FixedConfig(transport=transport)) as (service, running, stub, _):
        call = asyncio.ensure_future(stub.GetTokenizer(ask("wait")))
        await service.servicer.entered.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await running.calls.wait_idle()
        assert (await stub.GetTokenizer(ask("next"))).model == "next"


@TRANSPORTS
async def test_a_lost_connection_fails_its_calls_and_the_next_one_dials_again(transport: Any) -> None:
    async with served(FixedConfig(transport=transport)) as (service, _, stub, channel):
        call = asyncio.ensure_future(stub.GetTokenizer(ask("wait")))
        await service.servicer.entered.wait()
        connection: Any = channel._connection
        connection._transport.abort()
        assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
        answers = await asyncio.gather(*(stub.GetTokenizer(ask("next")) for _ in range(5)))
        assert {answer.model for answer in answers} == {"next"}
        assert channel._connection is not connection


@TRANSPORTS
async def test_closing_ends_what_is_under_way(transport: Any) -> None:
    async with served(FixedConfig(transport=transport)) as (service, running, stub, channel):
        call = asyncio.ensure_future(stub.GetTokenizer(ask("wait")))
        await service.servicer.entered.wait()
        channel.close()
        assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
        await running.calls.wait_idle()


@TRANSPORTS
async def test_an_answer_that_is_too_large_is_refused(transport: Any) -> None:
    async with served(FixedConfig(transport=transport), ChannelConfig(max_message_bytes=100_000)) as (_, _, stub, _):
        assert await code_of(stub.GetTokenizer(ask("x" * 200_000))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.GetTokenizer(ask("next"))).model == "next"


@TRANSPORTS
async def test_every_call_carries_the_token(transport: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    config = FixedConfig(transport=transport, auth_token_file=str(tmp_path / "token"))
    async with served(config, ChannelConfig(channel_token_file=str(tmp_path / "token"))) as (_, running, stub, _):
        assert (await stub.GetTokenizer(ask("known"))).model == "known"
        async with channel_to(running.address) as (stranger, _):
            assert await code_of(stranger.GetTokenizer(ask("x"))) is grpc.StatusCode.UNAUTHENTICATED


async def test_closing_amid_an_attempt_to_connect_is_unavailable_and_cancels_no_caller() -> None:
    # No server accepts, and the queue is full: an attempt to connect gets no answer.
    with socket.socket() as silent, contextlib.ExitStack() as waiting:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(3):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        async with channel_to(f"127.0.0.1:{silent.getsockname()[1]}") as (stub, channel):
            calls = [asyncio.ensure_future(stub.GetTokenizer(ask("x"), timeout=60.0)) for _ in range(2)]
            given_up = asyncio.ensure_future(stub.GetTokenizer(ask("x")))
            for _ in range(5):
                await asyncio.sleep(0)
            assert channel._dialing is not None
            given_up.cancel()
            channel.close()
            assert [await code_of(call) for call in calls] == [grpc.StatusCode.UNAVAILABLE] * 2
            with pytest.raises(asyncio.CancelledError):
                await given_up


@TRANSPORTS
async def test_a_closed_channel_connects_no_more(transport: Any) -> None:
    async with served(FixedConfig(transport=transport)) as (_, _, stub, channel):
        await stub.GetTokenizer(ask("x"))
        channel.close()
        assert await code_of(stub.GetTokenizer(ask("x"))) is grpc.StatusCode.UNAVAILABLE
        connection: Any = channel._connection
        assert connection.is_over


@TRANSPORTS
@pytest.mark.parametrize("size", [0, 20_000, 500_000])
async def test_answers_of_many_messages_arrive_whole_beside_each_other(transport: Any, size: int) -> None:
    async with served(FixedConfig(transport=transport)) as (_, running, stub, _):
        found = await asyncio.gather(*(_read(stub.GetDecodeTable(table(f"{size}"), timeout=60)) for _ in range(3)))
        assert found == [[(place, size) for place in range(20)]] * 3
        await running.calls.wait_idle()


@TRANSPORTS
async def test_an_answer_that_is_not_read_holds_back_its_own_call_and_no_other(transport: Any) -> None:
    async with served(FixedConfig(transport=transport)) as (service, running, stub, _):
        answers = stub.GetDecodeTable(table("500000"))
        assert (await anext(answers)).strip_count == 0
        assert (await stub.GetTokenizer(ask("x" * 3_000_000))).vocab_size == 7
        # Ten megabytes: the handler waits for its reader.
        assert not service.servicer.closed.is_set()
        assert [place for place, _ in await _read(answers)] == list(range(1, 20))
        await running.calls.wait_idle()


@TRANSPORTS
async def test_the_status_follows_the_messages(transport: Any) -> None:
    async with served(FixedConfig(transport=transport)) as (_, _, stub, _):
        answers = stub.GetDecodeTable(table("1 refuse"))
        assert [(await anext(answers)).strip_count for _ in range(20)] == list(range(20))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(answers)
        failure = from_rpc_error(caught.value)
        assert isinstance(failure, InvalidArgument)
        assert failure.field == "model"


@TRANSPORTS
@pytest.mark.parametrize("how", ["cancelled", "its reader is cancelled", "late", "the channel is closed", "lost"])
async def test_an_answer_that_is_given_up_ends_at_the_server(transport: Any, how: str) -> None:
    async with served(FixedConfig(transport=transport)) as (service, running, stub, channel):
        answers = stub.GetDecodeTable(table("1 wait"), timeout=0.3 if how == "late" else None)
        reading = asyncio.ensure_future(_read(answers))
        await service.servicer.entered.wait()
        codes = {"late": grpc.StatusCode.DEADLINE_EXCEEDED, "cancelled": grpc.StatusCode.CANCELLED}
        if how == "its reader is cancelled":
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            end_by: Any = {
                "cancelled": answers.cancel,
                "the channel is closed": channel.close,
                "lost": lambda: channel._connection._transport.abort(),
            }
            end_by.get(how, lambda: None)()
            assert await code_of(reading) is codes.get(how, grpc.StatusCode.UNAVAILABLE)
        await running.calls.wait_idle()
        assert service.servicer.closed.is_set()


@TRANSPORTS
async def test_a_message_among_many_that_is_too_large_ends_its_call(transport: Any) -> None:
    async with served(FixedConfig(transport=transport), ChannelConfig(max_message_bytes=100_000)) as (_, _, stub, _):
        assert await code_of(_read(stub.GetDecodeTable(table("200000")))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.GetTokenizer(ask("next"))).model == "next"


def table(model: str) -> pb.GetDecodeTableRequest:
    return pb.GetDecodeTableRequest(model=model)


async def _read(answers: Any) -> list[tuple[int, int]]:
    return [(one.strip_count, len(one.pieces[0])) async for one in answers]
