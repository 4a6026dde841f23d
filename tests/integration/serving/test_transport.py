"""Contract of serving.transport, on both transports: a service sees the same of a call on either."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from factories.servers.router import until
from factories.servers.transports import Setting, same
from grpc_health.v1 import health_pb2
from penstock.common.config import ChannelConfig, ServerConfig
from penstock.common.errors import InvalidArgument, from_rpc_error
from penstock.common.request_context import REQUEST_ID_KEY
from penstock.generation.delivery.streams import SessionStream
from penstock.serving.channels import until_serving, watch_health
from penstock.serving.transport import CheckedCall, ServerCall, make_transport
from penstock.v1 import generation_pb2, tokenizer_pb2_grpc
from penstock.v1 import tokenizer_pb2 as pb

DECODE_STREAM = "/penstock.v1.TokenizerService/DecodeStream"
PARSE = pb.DecodeStreamResponse.FromString


@pytest.fixture(params=["grpc", "asyncio"])
async def setting(request: pytest.FixtureRequest) -> AsyncIterator[Setting]:
    async with Setting(request.param).running() as one:
        yield one


def ask(model: str = "m") -> pb.GetTokenizerRequest:
    return pb.GetTokenizerRequest(model=model)


def part(number: int) -> pb.GetDecodeTableResponse:
    return pb.GetDecodeTableResponse(strip_count=number)


def answer(number: float) -> pb.DecodeStreamResponse:
    return pb.DecodeStreamResponse(detokenize_seconds=number)


def items(count: int) -> pb.DecodeStreamRequest:
    return pb.DecodeStreamRequest(items=[pb.DecodeStreamItem(stream_id=1)] * count)


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def for_ever(_: Any, __: ServerCall) -> None:
    await asyncio.Event().wait()


async def test_a_unary_call_is_answered(setting: Setting) -> None:
    assert (await setting.stub.GetTokenizer(ask("one"))).model == "one"


async def test_metadata_arrives_text_and_bytes(setting: Setting) -> None:
    async def handle(_: Any, call: ServerCall) -> pb.GetTokenizerResponse:
        sent = dict(call.invocation_metadata())
        assert sent["blob-bin"] == b"\x00\xff"
        return pb.GetTokenizerResponse(model=str(sent["plain"]))

    setting.servicer.handle = handle
    metadata = (("plain", "a value"), ("blob-bin", b"\x00\xff"))
    assert (await setting.stub.GetTokenizer(ask(), metadata=metadata)).model == "a value"


async def test_an_error_keeps_its_details(setting: Setting) -> None:
    async def handle(_: Any, __: ServerCall) -> None:
        raise InvalidArgument("model", "must not be this", reason="NOT_THIS")

    setting.servicer.handle = handle
    found = from_rpc_error(await failure_of(setting.stub.GetTokenizer(ask())))
    assert (type(found), found.reason, found.field) == (InvalidArgument, "NOT_THIS", "model")


async def test_abort_ends_the_call_with_its_status_and_trailers(setting: Setting) -> None:
    codes = []

    async def handle(_: Any, call: ServerCall) -> None:
        codes.append(call.code())
        with pytest.raises(grpc.aio.AbortError):
            await call.abort(grpc.StatusCode.DATA_LOSS, "gone", (("why", "fire"),))
        codes.append(call.code())
        raise grpc.aio.AbortError

    setting.servicer.handle = handle
    error = await failure_of(setting.stub.GetTokenizer(ask()))
    assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "gone")
    assert dict(error.trailing_metadata() or ())["why"] == "fire"
    assert codes[0] is grpc.StatusCode.OK


async def test_abort_without_trailers_keeps_those_that_are_set(setting: Setting) -> None:
    async def handle(_: Any, call: ServerCall) -> None:
        await call.abort(grpc.StatusCode.NOT_FOUND, "none")

    setting.servicer.handle = handle
    call = setting.stub.GetTokenizer(ask(), metadata=((REQUEST_ID_KEY, "mine"),))
    error = await failure_of(call)
    assert dict(error.trailing_metadata() or ())[REQUEST_ID_KEY] == "mine"


async def test_nothing_is_written_after_an_abort(setting: Setting) -> None:
    failed: list[BaseException] = []

    async def handle(_: Any, call: ServerCall) -> None:
        await call.write(part(1))
        try:
            await call.abort(grpc.StatusCode.DATA_LOSS, "gone")
        finally:
            try:
                await call.write(part(2))
            except Exception as error:
                failed.append(error)

    setting.servicer.handle = handle
    answers = aiter(setting.stub.GetDecodeTable(pb.GetDecodeTableRequest(model="m")))
    assert (await anext(answers)).strip_count == 1
    error = await failure_of(anext(answers))
    assert (error.code(), len(failed)) == (grpc.StatusCode.DATA_LOSS, 1)


async def test_the_first_abort_is_the_status(setting: Setting) -> None:
    async def handle(_: Any, call: ServerCall) -> None:
        try:
            await call.abort(grpc.StatusCode.DATA_LOSS, "gone")
        finally:
            raise InvalidArgument("model", "must not be this")

    setting.servicer.handle = handle
    error = await failure_of(setting.stub.GetTokenizer(ask()))
    assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "gone")


async def test_an_abort_by_another_task_ends_the_call_at_once(setting: Setting) -> None:
    raised: list[BaseException] = []
    told = asyncio.Event()

    async def handle(_: Any, call: ServerCall) -> None:
        async def end() -> None:
            try:
                await call.abort(grpc.StatusCode.DATA_LOSS, "gone")
            except Exception as error:
                raised.append(error)

        await asyncio.create_task(end())
        await told.wait()

    setting.servicer.handle = handle
    error = await failure_of(setting.stub.GetTokenizer(ask(), timeout=20))
    await until(lambda: bool(raised))
    told.set()
    assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "gone")
    assert isinstance(raised[0], grpc.aio.AbortError)


async def test_a_deadline_ends_both_sides(setting: Setting) -> None:
    left: list[float | None] = []

    async def handle(_: Any, call: ServerCall) -> None:
        left.append(call.time_remaining())
        await asyncio.Event().wait()

    setting.servicer.handle = handle
    error = await failure_of(setting.stub.GetTokenizer(ask(), timeout=0.5))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    if left:  # it may have passed on the way
        await setting.servicer.cancelled.wait()
        assert left[0] is not None
        # The deadline travels as an absolute time in whole units of the wire: a hair above the caller's is rounding.
        assert 0 <= left[0] <= 0.51


async def test_without_a_deadline_there_is_no_time(setting: Setting) -> None:
    async def handle(request: Any, call: ServerCall) -> pb.GetTokenizerResponse:
        assert call.time_remaining() is None
        return await same(request)

    setting.servicer.handle = handle
    await setting.stub.GetTokenizer(ask())


async def test_a_caller_that_gives_up_cancels_the_handler(setting: Setting) -> None:
    setting.servicer.handle = for_ever
    calling = asyncio.ensure_future(setting.stub.GetTokenizer(ask()))
    await setting.servicer.entered.wait()
    calling.cancel()
    await setting.servicer.cancelled.wait()


async def test_a_stream_of_answers_comes_in_order(setting: Setting) -> None:
    async def handle(_: Any, call: ServerCall) -> None:
        for number in range(100):
            await call.write(part(number))

    setting.servicer.handle = handle
    got = [one.strip_count async for one in setting.stub.GetDecodeTable(pb.GetDecodeTableRequest())]
    assert got == list(range(100))


async def test_try_write_sends_each_message_once_or_leaves_it_to_write(setting: Setting) -> None:
    """More than the windows take: without a reader it is refused sooner or later, and `write` goes on after it."""
    large = b"x" * 8000
    refused: list[int] = []

    async def handle(_: Any, call: ServerCall) -> None:
        message = pb.GetDecodeTableResponse(pieces=[large])
        assert not call.try_write(message)  # before the first write
        await call.write(message)
        for number in range(1, 300):
            # One object for all: it is the writer's again at once.
            message.strip_count = number
            if not call.try_write(message):
                refused.append(number)
                await call.write(pb.GetDecodeTableResponse(strip_count=number, pieces=[large]))

    setting.servicer.handle = handle
    answers = setting.stub.GetDecodeTable(pb.GetDecodeTableRequest())
    got = [one.strip_count async for one in answers]
    assert got == list(range(300))
    assert refused
    assert (len(refused) == 299) is (not setting.servicer.call.writes_at_once)


async def test_nothing_is_written_to_a_call_that_is_over(setting: Setting) -> None:
    async def handle(_: Any, call: ServerCall) -> None:
        await call.write(part(0))

    setting.servicer.handle = handle
    assert len([one async for one in setting.stub.GetDecodeTable(pb.GetDecodeTableRequest())]) == 1
    call: ServerCall = setting.servicer.call
    assert not call.try_write(part(1))


async def test_a_reader_that_gives_up_cancels_the_stream(setting: Setting) -> None:
    async def handle(_: Any, call: ServerCall) -> None:
        await call.write(part(7))
        await asyncio.Event().wait()

    setting.servicer.handle = handle
    answers = setting.stub.GetDecodeTable(pb.GetDecodeTableRequest())
    async for one in answers:
        assert one.strip_count == 7
        break
    answers.cancel()
    await setting.servicer.cancelled.wait()


async def count_items(requests: Any, call: ServerCall) -> None:
    """Answers each request by the number of its items; one without any ends the call."""
    async for request in requests:
        if not request.items:
            return
        await call.write(answer(len(request.items)))


async def test_what_is_written_together_is_taken_in_order_until_the_call_ends(setting: Setting) -> None:
    setting.servicer.handle = count_items
    call = await setting.channel.open_stream(DECODE_STREAM, PARSE)
    sizes = [1, 5000, 2, *range(3, 50)]
    got: list[float] = []
    running = asyncio.ensure_future(call.run(lambda one: got.append(one.detokenize_seconds)))
    await call.write(items(9))
    await call.write_all([items(size) for size in sizes])
    await call.write_all([])
    await call.write(items(0))
    await running
    assert got == [9, *sizes]


async def test_joined_messages_hold_the_same(setting: Setting) -> None:
    async def handle(requests: Any, call: ServerCall) -> None:
        async for request in requests:
            for number in range(request.items[0].stream_id):
                await call.write(pb.DecodeStreamResponse(results=[pb.DecodeStreamResult(text=str(number))]))
            return

    setting.servicer.handle = handle
    call = await setting.channel.open_stream(DECODE_STREAM, PARSE, joins=True)
    await call.write(pb.DecodeStreamRequest(items=[pb.DecodeStreamItem(stream_id=200)]))
    got: list[str] = []
    await call.run(lambda one: got.extend(result.text for result in one.results))
    assert got == [str(number) for number in range(200)]


async def test_a_writer_that_joins_what_waits_notices_a_reader_that_is_behind(setting: Setting) -> None:
    """On grpc 64 KiB lay between the two: a step's tokens waited until a hundred messages before them were read."""
    session, steps, large = SessionStream(bound=1000), 100, 40

    async def handle(requests: Any, call: ServerCall) -> None:
        # gRPC measures the connection, and widens its windows.
        event = generation_pb2.SessionEvent(request_id="r" * (256 << 10))
        for _ in range(large):
            await call.write(generation_pb2.SessionResponse(events=[event]))
        await anext(aiter(requests))
        async for message in session.buffer:
            await call.write(message)

    setting.servicer.handle = handle
    call = await setting.channel.open_stream(DECODE_STREAM, generation_pb2.SessionResponse.FromString, joins=True)
    received = [await call.receive() for _ in range(large)] if setting.config.transport == "grpc" else []
    assert all(message is not None for message in received)
    await call.write(pb.DecodeStreamRequest())
    for step in range(1, steps + 1):
        events = [generation_pb2.SessionEvent(request_id="r" * 32)] * 16
        session.buffer.put(generation_pb2.SessionResponse(step=step, events=events))
        # So that the writer takes each, where it can.
        await asyncio.sleep(0.002)
    session.buffer.close()
    read: list[generation_pb2.SessionResponse] = []
    await call.run(read.append)
    assert read[-1].step == steps
    assert sum(len(message.events) for message in read) == 16 * steps + (0 if received else large)
    assert len(read) <= 12 + (0 if received else large)


async def test_run_raises_the_status_of_the_call(setting: Setting) -> None:
    async def handle(_: Any, call: ServerCall) -> None:
        await call.write(answer(1))
        raise InvalidArgument("items", "must not be these")

    setting.servicer.handle = handle
    call = await setting.channel.open_stream(DECODE_STREAM, PARSE)
    got: list[float] = []
    error = await failure_of(call.run(lambda one: got.append(one.detokenize_seconds)))
    assert (got, from_rpc_error(error).field) == ([1.0], "items")


async def test_run_raises_what_its_taker_raises(setting: Setting) -> None:
    setting.servicer.handle = count_items
    call = await setting.channel.open_stream(DECODE_STREAM, PARSE)

    def take(_: Any) -> None:
        raise ZeroDivisionError

    await call.write(items(1))
    with pytest.raises(ZeroDivisionError):
        await call.run(take)
    call.cancel()


async def test_run_returns_at_a_message_that_cannot_be_parsed(setting: Setting) -> None:
    setting.servicer.handle = count_items

    def parse(data: bytes) -> Any:
        return PARSE(b"\xff" + data)

    call = await setting.channel.open_stream(DECODE_STREAM, parse)
    await call.write(items(1))
    got: list[Any] = []
    await call.run(got.append)
    assert not got
    call.cancel()


async def test_a_stream_that_is_cancelled_ends_both_sides(setting: Setting) -> None:
    setting.servicer.handle = for_ever
    call = await setting.channel.open_stream(DECODE_STREAM, PARSE)
    running = asyncio.ensure_future(call.run(lambda _: None))
    await setting.servicer.entered.wait()
    call.cancel()
    assert (await failure_of(running)).code() is grpc.StatusCode.CANCELLED
    await setting.servicer.cancelled.wait()
    with pytest.raises((asyncio.InvalidStateError, grpc.aio.AioRpcError)):
        await call.write(items(1))


async def test_a_task_that_runs_a_stream_can_be_cancelled(setting: Setting) -> None:
    setting.servicer.handle = for_ever
    call = await setting.channel.open_stream(DECODE_STREAM, PARSE)
    running = asyncio.ensure_future(call.run(lambda _: None))
    await setting.servicer.entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    call.cancel()


async def test_an_unknown_method_is_unimplemented(setting: Setting) -> None:
    call = await setting.channel.open_stream("/nobody/Knows", PARSE)
    assert (await failure_of(call.run(lambda _: None))).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_is_followed(setting: Setting) -> None:
    status = health_pb2.HealthCheckResponse
    await setting.health.set("it", status.NOT_SERVING)
    waiting = asyncio.ensure_future(until_serving(setting.channel.for_stubs, "it"))
    async with contextlib.aclosing(watch_health(setting.channel.for_stubs, "it")) as updates:
        assert not await anext(updates)
        await setting.health.set("it", status.SERVING)
        assert await anext(updates)
    assert await waiting


async def test_a_stream_with_its_own_connection_is_there_once_that_is() -> None:
    """Else a backend that lets no further connection in would be sent requests."""
    config = ServerConfig(transport="grpc")
    silent = await asyncio.start_server(lambda _, __: None, "127.0.0.1", 0)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with (
        silent,
        make_transport(config).open_channel(address, ChannelConfig(), connect_timeout_seconds=0.2) as channel,
    ):
        error = await failure_of(channel.open_stream(DECODE_STREAM, PARSE, joins=True))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("transport", ["grpc", "asyncio"])
async def test_an_address_without_a_server_is_unavailable(transport: Any) -> None:
    config = ServerConfig(transport=transport)
    opened = make_transport(config).open_channel("127.0.0.1:1", ChannelConfig(), connect_timeout_seconds=60.0)
    async with opened as channel:

        async def run() -> None:
            call = await channel.open_stream(DECODE_STREAM, PARSE)
            await call.run(lambda _: None)

        assert (await failure_of(run())).code() is grpc.StatusCode.UNAVAILABLE
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel.for_stubs)
        assert (await failure_of(stub.GetTokenizer(ask()))).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_port_that_is_taken_is_an_os_error(setting: Setting) -> None:
    other = setting.make_server(ServerConfig(transport=setting.config.transport, port=setting.port))
    with pytest.raises(OSError, match=r".+"):
        await other.open_port()
    await other.stop(None)


async def test_a_server_that_stops_ends_its_calls(setting: Setting) -> None:
    setting.servicer.handle = for_ever
    calling = asyncio.ensure_future(setting.stub.GetTokenizer(ask()))
    await setting.servicer.entered.wait()
    await setting.server.stop(0)
    assert (await failure_of(calling)).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@pytest.mark.parametrize("transport", ["grpc", "asyncio"])
async def test_calls_beyond_the_most_are_refused(transport: str) -> None:
    async with Setting(transport, max_calls=2).running() as setting:
        setting.servicer.handle = for_ever
        held = [asyncio.ensure_future(setting.stub.GetTokenizer(ask())) for _ in range(2)]
        await until(lambda: setting.calls.in_flight == 2)
        # On a connection of its own: a client that knows the limit of streams waits for its turn.
        async with setting.open_channel() as another:
            stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(another.for_stubs)
            assert (await failure_of(stub.GetTokenizer(ask()))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in held:
            call.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_the_wrapper_is_asked_once_a_method(setting: Setting) -> None:
    wrapped: list[str] = []
    server = setting.transport.make_server(
        setting.config,
        max_calls=10,
        wrap=lambda name, handler: (wrapped.append(name), setting.calls.wrap(name, handler))[1],
        shares_port=False,
    )
    any_server: Any = server
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(setting.servicer, any_server)
    port = await server.open_port()
    await server.start()
    async with setting.open_channel(port) as channel:
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel.for_stubs)
        for _ in range(3):
            await stub.GetTokenizer(ask())
        assert wrapped == ["/penstock.v1.TokenizerService/GetTokenizer"]
    await server.stop(None)


@pytest.mark.parametrize("transport", ["grpc", "asyncio"])
async def test_a_call_that_its_handler_vouches_for_is_bounded_as_others_are(transport: str) -> None:
    """Until then a stranger's stream has 64 KiB at most (asyncio)."""
    setting = Setting(transport)
    setting.server = setting.transport.make_server(
        setting.config, max_calls=1, wrap=setting.calls.wrap, shares_port=False, admit=lambda *_: False
    )
    sizes = []

    async def handle(requests: AsyncIterator[pb.DecodeStreamRequest], call: CheckedCall) -> None:
        call.vouch()
        async for request in requests:
            sizes.append(request.ByteSize())
            await call.write(answer(len(sizes)))

    setting.servicer.handle = handle
    async with setting.running():
        large = pb.DecodeStreamRequest(items=[pb.DecodeStreamItem(stream_id=1, token_ids=[1000] * 50_000)])
        stream = await setting.channel.open_stream(DECODE_STREAM, PARSE)
        for number, message in enumerate((items(1), large), 1):
            await stream.write(message)
            told = await stream.receive()
            assert told is not None
            assert told.detokenize_seconds == number
        await stream.done_writing()
        assert await stream.receive() is None
        assert sizes[1] == large.ByteSize() > 65536
