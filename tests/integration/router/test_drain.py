"""Ends of the router's calls that outlive the drain's grace: on both transports Finished, then one status."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from factories.engine.step_gate import held_after
from factories.servers import stack
from factories.servers.emitting_backend import count_up
from factories.servers.generation import generation_service
from factories.servers.held_backend import WANT_IDS, held, status_of
from factories.servers.router import Answer, backend, generate, running_router, tokenizer_address, until
from factories.wire.conversation import user
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import from_rpc_error
from penstock.v1 import common_pb2, config_pb2, text_pb2, text_pb2_grpc
from penstock_client import Aborted, AsyncClient

ABORTED, UNAVAILABLE = grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE
OVER = "DRAIN_GRACE_OVER"
LONG = config_pb2.GenerationConfig(max_new_tokens=1000)
# More than enough for the first token of two requests.
STEPS = 8

both_transports = pytest.mark.parametrize("transport", ["asyncio", "grpc"])


async def first_delta(call: Any) -> Answer:
    """Read a stream up to its first delta."""
    answer = Answer()
    while not answer.deltas:
        answer.add(await call.read())
    return answer


async def end_of(call: Any, answer: Answer) -> tuple[grpc.StatusCode, Any]:
    """Read the rest of a stream into `answer`; return its status."""

    async def read() -> None:
        # grpc.aio.EOF is falsy, and no event of ours is.
        while event := await call.read():
            answer.add(event)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    return caught.value.code(), from_rpc_error(caught.value)


def assert_whole(answer: Answer, error: Any) -> None:
    """Assert that Finished came last, with the figures of the stream."""
    (sequence,) = answer.finished.sequences
    assert sequence.finish_reason == common_pb2.FINISH_REASON_ERROR
    assert sequence.token_count == answer.finished.usage.completion_tokens >= len(answer.deltas)
    assert error.metadata["last_seq"] == str(answer.finished.last_seq) == str(len(answer.deltas) - 1)


@asynccontextmanager
async def router_process(backend_address: str, transport: str) -> AsyncIterator[stack.Process]:
    """A router of its own, with a short grace."""
    flags = ("--backend", backend_address, "--transport", transport, "--drain-grace-seconds", "0.2s")
    process = stack.start("router", "--tokenizer", tokenizer_address(), *flags)
    try:
        await asyncio.to_thread(process.wait_ready)
        yield process
    finally:
        process.kill()
        process.log.unlink(missing_ok=True)


@both_transports
async def test_sigterm_ends_every_live_call_by_itself_once_the_grace_is_over(transport: str) -> None:
    async with (
        generation_service(demo_folder(), kv_memory="32MiB", transport=transport) as generation,
        router_process(generation.running.address, transport) as process,
        grpc.aio.insecure_channel(process.address) as channel,
        AsyncClient(process.address) as client,
    ):
        stub: Any = text_pb2_grpc.TextServiceStub(channel)
        with held_after(0) as gate:
            call = stub.Generate(generate(config=LONG, stop=config_pb2.StopConfig(ignore_eos=True)))
            chat = client.stream(user("Count from 1 to 20."), max_new_tokens=1000, ignore_eos=True)
            chatting = asyncio.create_task(anext(chat))
            await generation.until(lambda load: load.running_requests + load.waiting_requests == 2)
            gate.allow(STEPS)
            answer = await first_delta(call)
            await chatting
            await until(lambda: gate.is_spent)
            items = [text_pb2.ScoreTextItem(prompt="Hello", continuation=" world")]
            score = asyncio.create_task(status(stub.Score(text_pb2.ScoreTextRequest(items=items))))
            await generation.until(lambda load: load.running_requests + load.waiting_requests == 3)
            process.popen.send_signal(signal.SIGTERM)
            code, error = await end_of(call, answer)
            assert (code, error.reason) == (ABORTED, OVER)
            assert_whole(answer, error)
            with pytest.raises(Aborted) as caught:
                await chat.result()
            assert caught.value.reason == OVER
            assert chat.state.finished is not None
            code, error = await score
            assert (code, error.reason) == (UNAVAILABLE, OVER)
            assert await asyncio.to_thread(process.popen.wait, 130) == 0, process.output()


async def status(call: Any) -> tuple[grpc.StatusCode, Any]:
    """Return the status by which a unary call failed."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), from_rpc_error(caught.value)


@both_transports
@pytest.mark.parametrize("grace", [0.0, 0.05])
async def test_a_backend_that_is_gone_holds_up_neither_finished_nor_the_stop(transport: str, grace: float) -> None:
    async with (
        held(allowance=2, transport=transport) as one,
        running_router(one, transport=transport, drain_grace_seconds=grace) as router,
    ):
        call = router.stub.Generate(generate(output=WANT_IDS))
        answer = await first_delta(call)
        await one.stop()
        await router.until("backend_up", 0, backend=one.address)
        stopping = asyncio.create_task(router.server.stop())
        code, error = await end_of(call, answer)
        assert (code, error.reason) == (ABORTED, OVER)
        assert_whole(answer, error)
        await stopping


@both_transports
async def test_what_has_had_no_output_is_unavailable_and_may_be_tried_elsewhere(transport: str) -> None:
    settings = {"drain_grace_seconds": 0.05, "max_live_requests": 1, "transport": transport}
    async with held(transport=transport) as one, running_router(one, **settings) as router:
        placed = asyncio.create_task(status_of(router.stub.Generate(generate())))
        await one.until(lambda: one.running == 1)
        waiting = asyncio.create_task(status_of(router.stub.Generate(generate())))
        await router.until("num_requests_waiting", 1)
        await router.server.stop()
        for code, error in (await placed, await waiting):
            assert (code, error.reason) == (UNAVAILABLE, OVER)


@both_transports
async def test_a_reader_that_does_not_read_holds_up_no_stop(transport: str) -> None:
    steps = 64
    async with (
        backend(script=count_up(10**6), tokens_per_step=512, allowance=steps, transport=transport) as one,
        running_router(one, transport=transport, drain_grace_seconds=0.05) as router,
    ):
        narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        async with grpc.aio.insecure_channel(router.server.address, options=narrow) as channel:
            stub: Any = text_pb2_grpc.TextServiceStub(channel)
            call = stub.Generate(generate(output=WANT_IDS))
            answer = await first_delta(call)
            await one.until(lambda: one.steps == steps)
            await until(lambda: router.metric("generation_tokens_total") == 512 * steps)
            await router.server.stop()
            code, error = await end_of(call, answer)
            assert router.server.calls.in_flight == 0
            if transport == "asyncio":
                assert (code, error.reason) == (ABORTED, OVER)
            else:
                # There a status waits behind messages that do not fit the client's window, until the server hangs up.
                assert code in (ABORTED, UNAVAILABLE)
