"""Real engines that hang, break, stop or go dark amid streams: every stream goes on elsewhere, exactly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from factories.servers.failing_engines import SESSION, FailingEngine, failing_engines, owner, router_before
from factories.servers.generation import request as generation_request
from factories.servers.held_backend import WANT_IDS, stop_after
from factories.servers.router import Router, collect, generate
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import from_rpc_error
from penstock.v1 import config_pb2, generation_pb2_grpc, text_pb2
from penstock_client._tensors import set_rows
from safetensors.torch import load_file

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 240
STALL_SECONDS = 3.0
# An engine may have made its last token before the test knows of the 20th: then the fault comes too late.
TRIES = 20
# Without the C++ kernels sums depend on the batch, and in bfloat16 an id may with them.
EXACT = ("--dtype", "float32")
Fault = Callable[[FailingEngine], None]
SHORT = config_pb2.GenerationConfig(max_new_tokens=4)
GREEDY = config_pb2.GenerationConfig(max_new_tokens=TOKENS)
SEEDED = config_pb2.GenerationConfig(max_new_tokens=TOKENS, do_sample=True, temperature=1.1, seed=7)


def asking(config: config_pb2.GenerationConfig, text: str = "Count from 1 to 20.") -> text_pb2.GenerateTextRequest:
    """A request of one and the same session."""
    stop = config_pb2.StopConfig(ignore_eos=True)
    return generate(text, config=config, stop=stop, output=WANT_IDS, session_id="sticky")


def embedded(config: config_pb2.GenerationConfig) -> text_pb2.GenerateTextRequest:
    """The same with a prompt of embeddings, of more than a megabyte, before the text."""
    request = asking(config)
    model = load_file(demo_folder() / "model.safetensors")["model.embed_tokens.weight"].float()
    set_rows(request.inputs_embeds, model[torch.arange(3, 1403)] * 1.1)
    request.inputs_embeds_before_ids = True
    return request


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[list[FailingEngine]]:
    """Two that hang and stop, and get well again."""
    async with failing_engines(2, "--hung-step-seconds", "1", *EXACT) as made:
        yield made


async def moved(
    router: Router,
    engines: list[FailingEngine],
    config: config_pb2.GenerationConfig,
    fault: Fault,
    undo: Fault,
    ask: Callable[[config_pb2.GenerationConfig], text_pb2.GenerateTextRequest] = asking,
) -> FailingEngine:
    """Let a stream meet `fault` at its 20th token, hold it against one that met none; return the engine that failed.

    `undo` ends a fault that came too late.
    """
    wanted = await collect(router.stub.Generate(ask(config)))
    for _ in range(TRIES):
        failed: list[FailingEngine] = []

        async def fail(failed: list[FailingEngine] = failed) -> None:
            failed.append(owner(router, engines))
            fault(failed[0])

        answer = await collect(router.stub.Generate(ask(config)), stop_after(20, fail))
        assert len(answer.ids()) == TOKENS
        assert (answer.ids(), answer.text()) == (wanted.ids(), wanted.text())
        if answer.finished.attempts > 1:
            assert answer.finished.attempts == 2
            # An engine that stays dark is lost again by its next session, where the rest of the answer takes as long.
            assert router.metric("backend_losses_total", backend=failed[0].address) >= 1
            return failed[0]
        undo(failed[0])
        await failed[0].until(serving=True)
        await router.until("backend_up", 1.0, backend=failed[0].address)
    raise AssertionError(f"the fault met no stream in {TRIES} tries")


@pytest.mark.parametrize(
    "config", [pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow), pytest.param(SEEDED, id="seeded")]
)
async def test_a_stream_moves_from_an_engine_that_hangs_which_shows_it_and_comes_back(
    engines: list[FailingEngine], config: config_pb2.GenerationConfig
) -> None:
    async with router_before(engines, stall_timeout_seconds=STALL_SECONDS) as router:
        hung = await moved(router, engines, config, lambda one: one.order("engine.step.hang"), FailingEngine.lift)
        await hung.until(serving=False)
        assert (await hung.load()).step_hung
        await router.until("backend_up", 0.0, backend=hung.address)
        # A session that was there before goes elsewhere, too, and waits for nothing.
        tries = [await collect(router.stub.Generate(asking(SHORT))) for _ in range(5)]
        assert [answer.finished.attempts for answer in tries] == [1] * 5
        hung.lift()
        await hung.until(serving=True)
        await hung.until_free()
        await router.until("backend_up", 1.0, backend=hung.address)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded", marks=pytest.mark.slow)]
)
async def test_a_stream_moves_from_a_process_that_is_stopped(
    engines: list[FailingEngine], config: config_pb2.GenerationConfig
) -> None:
    async with router_before(engines, stall_timeout_seconds=STALL_SECONDS) as router:
        stopped = await moved(router, engines, config, FailingEngine.stop, FailingEngine.go_on)
        stopped.go_on()
        await stopped.until_free()
        await router.until("backend_up", 1.0, backend=stopped.address)


@pytest.mark.slow
async def test_a_stream_with_a_prompt_of_embeddings_moves(engines: list[FailingEngine]) -> None:
    async with router_before(engines) as router:
        lost = await moved(router, engines, SEEDED, lambda one: one.proxy.reset(), lambda _: None, embedded)
        await lost.until_free()
        await router.until("backend_up", 1.0, backend=lost.address)


@pytest.mark.parametrize(
    "said", [pytest.param(b"", id="black hole", marks=pytest.mark.slow), pytest.param(SESSION, id="session dark")]
)
async def test_a_stream_moves_from_a_connection_that_goes_dark(engines: list[FailingEngine], said: bytes) -> None:
    async with router_before(engines, transport="asyncio", stall_timeout_seconds=STALL_SECONDS) as router:
        dark = await moved(router, engines, GREEDY, lambda one: one.proxy.freeze(said), lambda one: one.proxy.thaw())
        dark.proxy.thaw()
        await dark.until_free()
        await router.until("backend_up", 1.0, backend=dark.address)


async def test_a_hung_step_does_not_keep_a_process_from_its_end() -> None:
    async with (
        failing_engines(1, "--hung-step-seconds", "0.5", "--drain-grace-seconds", "0.5") as (engine,),
        grpc.aio.insecure_channel(engine.process.address) as channel,
    ):
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(generation_request(config={"max_new_tokens": 2000}))
        assert (await call.read()).HasField("started")
        engine.order("engine.step.hang")
        await engine.until(serving=False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(generation_request()).read()
        assert from_rpc_error(caught.value).reason == "ENGINE_HUNG"
        engine.process.popen.terminate()
        assert await engine.exit_code() == 0
        call.cancel()


async def test_streams_move_from_an_engine_whose_step_raises_and_its_process_ends() -> None:
    for _ in range(TRIES):
        async with failing_engines(2, *EXACT) as engines, router_before(engines) as router:
            texts = [f"Count from {number} to 20." for number in range(4)]
            # All at once, which is several times faster: no id depends on what else is in a step.
            wanted = await asyncio.gather(*(collect(router.stub.Generate(asking(GREEDY, text))) for text in texts))
            begun = asyncio.Event()

            async def note(begun: asyncio.Event = begun) -> None:
                begun.set()

            streams = [
                asyncio.ensure_future(collect(router.stub.Generate(asking(GREEDY, text)), stop_after(5, note)))
                for text in texts
            ]
            await begun.wait()
            broken = owner(router, engines)
            broken.order("engine.step.raise")
            answers = await asyncio.gather(*streams)
            assert [answer.ids() for answer in answers] == [answer.ids() for answer in wanted]
            if all(answer.finished.attempts == 1 for answer in answers):
                # It came too late.
                continue
            assert await broken.exit_code() == 1
            assert router.metric("poisoned_requests_total") == 0
            other = engines[1 - engines.index(broken)]
            await other.until_free()
            return
    raise AssertionError(f"the fault met no stream in {TRIES} tries")
