"""Score over real generation services on the demo model, directly and through a router."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio
from factories.engine.step_gate import held_after
from factories.servers import stack
from factories.servers.generation import Client, generation_service, request
from factories.servers.router import Router, running_router, until
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import InvalidArgument, NotFound, PenstockError, ResourceExhausted, from_rpc_error
from penstock.v1 import admin_pb2, generation_pb2, text_pb2
from penstock_client import AsyncClient
from penstock_client import Client as SyncClient

pytestmark = pytest.mark.asyncio(loop_scope="module")
# The first items are answered in them, which watchers of the load see, and many are left.
SOME_STEPS = 8
GREETINGS = [("Hello", ", world"), ("The capital of France is", " Paris"), ("The capital of France is ", "Paris")]


@pytest_asyncio.fixture(loop_scope="module")
async def client() -> AsyncIterator[Client]:
    async with generation_service(demo_folder(), kv_memory="32MiB", block_size=4, dtype="float32") as one:
        yield one


@asynccontextmanager
async def stack_of_one(**config: Any) -> AsyncIterator[tuple[Client, Router]]:
    async with (
        generation_service(demo_folder(), kv_memory="32MiB", block_size=4, dtype="float32") as one,
        running_router(backend=(one.running.address,), **config) as router,
    ):
        yield one, router


Served = tuple[Client, Router]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    """A stack for tests that leave nothing in it."""
    async with stack_of_one() as both:
        yield both


def items(*pairs: tuple[list[int], list[int]]) -> list[generation_pb2.ScoreItem]:
    return [generation_pb2.ScoreItem(prompt_token_ids=p, continuation_token_ids=c) for p, c in pairs]


def text_items(*pairs: tuple[str, str]) -> list[text_pb2.ScoreTextItem]:
    return [text_pb2.ScoreTextItem(prompt=prompt, continuation=continuation) for prompt, continuation in pairs]


async def error_of(call: Any) -> PenstockError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


LONG = list(range(2, 40)) * 40


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"items": []}, "items"),
        ({"items": items(*[([5], [6])] * 257)}, "items"),
        ({"items": items(([5], [6]), ([], [6]))}, "items[1].prompt_token_ids"),
        ({"items": items(([5], []))}, "items[0].continuation_token_ids"),
        ({"items": items(([1 << 20], [6]))}, "items[0].prompt_token_ids"),
        ({"items": items(([5], [6]), ([5], [1 << 31]))}, "items[1].continuation_token_ids"),
        ({"items": items((LONG * 3, LONG * 3))}, "items[0].prompt_token_ids"),
        ({"items": items(([5], [6])), "top_logprobs": 21}, "top_logprobs"),
        ({"items": items(([5], [6])), "cache_salt": "x" * 300}, "cache_salt"),
        ({"items": items(*[([5], LONG[:500])] * 20), "top_logprobs": 20}, "items"),
    ],
)
async def test_bad_items_are_refused_by_name(client: Client, fields: dict[str, Any], field: str) -> None:
    error = await error_of(client.generation.Score(generation_pb2.ScoreRequest(**fields)))
    assert isinstance(error, InvalidArgument)
    assert error.field == field


async def test_another_models_name_is_not_found(client: Client) -> None:
    error = await error_of(client.generation.Score(generation_pb2.ScoreRequest(model="other", items=items(([5], [6])))))
    assert isinstance(error, NotFound)


async def test_an_item_that_the_pool_cannot_hold_is_refused() -> None:
    async with generation_service(demo_folder(), kv_memory="256KiB", block_size=4, max_context=1024) as client:
        error = await error_of(client.generation.Score(generation_pb2.ScoreRequest(items=items((LONG[:900], [6])))))
    assert isinstance(error, ResourceExhausted)
    assert error.reason == "EXCEEDS_KV_POOL"


async def test_cancelling_ends_every_item(client: Client) -> None:
    many = items(*[([5 + index, *LONG[:700]], [6]) for index in range(64)])
    with held_after(SOME_STEPS):
        call = client.generation.Score(generation_pb2.ScoreRequest(items=many))
        await client.until(lambda load: load.running_requests > 0)
        call.cancel()
    await client.until_idle()
    # The service goes on.
    response = await client.generation.Score(generation_pb2.ScoreRequest(items=items(([5], [6]))))
    assert len(response.results) == 1


async def test_a_deadline_ends_every_item(client: Client) -> None:
    many = items(*[([5 + index, *LONG[:900]], [6]) for index in range(200)])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generation.Score(generation_pb2.ScoreRequest(items=many), timeout=0.05)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await client.until_idle()


async def test_aborting_everything_ends_the_call(client: Client) -> None:
    many = items(*[([5 + index, *LONG[:900]], [6]) for index in range(200)])
    with held_after(SOME_STEPS):
        call = asyncio.ensure_future(error_of(client.generation.Score(generation_pb2.ScoreRequest(items=many))))
        await client.until(lambda load: load.running_requests > 0)
        await client.generation.Abort(generation_pb2.AbortRequest(all=True))
    assert (await call).reason == "ABORTED"
    await client.until_idle()


@pytest.mark.slow
async def test_a_drain_lets_a_call_finish_with_the_items_that_still_wait(client: Client) -> None:
    many = items(*[([5 + index, *LONG[:300]], [6]) for index in range(100)])
    with held_after(SOME_STEPS):
        call = asyncio.ensure_future(client.generation.Score(generation_pb2.ScoreRequest(items=many)))
        await client.until(lambda load: load.running_requests > 0)
        drain = client.admin.Drain(admin_pb2.DrainRequest())
        await client.until(lambda load: load.draining)
    await drain
    assert len((await call).results) == 100
    assert (await error_of(client.generation.Score(generation_pb2.ScoreRequest(items=many[:1])))).reason == "DRAINING"


@pytest.mark.slow
async def test_scores_and_streams_share_the_batch_and_change_nothing_for_each_other(client: Client) -> None:
    alone = (await client.generate(request(range(5, 40)))).ids()
    many = items(*[([5 + index, *LONG[:300]], [6, 7, 8]) for index in range(48)])
    message = generation_pb2.ScoreRequest(items=many)
    before = await client.generation.Score(message)
    together, answer = await asyncio.gather(
        client.generation.Score(message), client.generate(request(range(5, 40), config={"max_new_tokens": 8}))
    )
    assert answer.ids() == alone
    for one, other in zip(before.results, together.results, strict=True):
        assert abs(one.logprob - other.logprob) < 1e-3


async def test_text_is_scored_as_the_ids_of_the_whole(client: Client) -> None:
    async with running_router(backend=(client.running.address,)) as router:
        answer = await router.stub.Score(text_pb2.ScoreTextRequest(items=text_items(*GREETINGS), top_logprobs=2))
        for (prompt, continuation), result in zip(GREETINGS, answer.results, strict=True):
            whole = await router.encode(prompt + continuation)
            scored = [entry.chosen.token_id for entry in result.logprobs]
            assert whole[-len(scored) :] == scored
            assert await router.decode(scored) in ((prompt + continuation)[len(prompt.rstrip()) :], continuation)
            direct = await client.generation.Score(
                generation_pb2.ScoreRequest(items=items((whole[: -len(scored)], scored)))
            )
            assert abs(direct.results[0].logprob - result.logprob) < 1e-4
            assert math.isclose(sum(entry.chosen.logprob for entry in result.logprobs), result.logprob, abs_tol=1e-4)
            for entry in result.logprobs:
                assert entry.chosen.text == await router.decode([entry.chosen.token_id])
                assert len(entry.top) == 2
                assert all(alternative.text for alternative in entry.top)


async def test_a_space_at_the_prompts_end_belongs_to_the_continuation() -> None:
    async with stack_of_one() as (_, router):
        answer = await router.stub.Score(text_pb2.ScoreTextRequest(items=text_items(*GREETINGS[1:])))
        without, with_space = answer.results
        assert [e.chosen.token_id for e in without.logprobs] == [e.chosen.token_id for e in with_space.logprobs]
        assert abs(without.logprob - with_space.logprob) < 1e-4


async def test_a_token_across_the_boundary_counts_as_continuation() -> None:
    """The token is scored as in the encoding of the whole; the harness' cut by number of ids would lose it."""
    async with stack_of_one() as (_, router):
        text = " the capital of the country"
        whole = await router.encode(text)
        cuts = [cut for cut in range(2, len(text) - 1) if text[cut] != " " and text[cut - 1] != " "]
        joined = 0
        for cut in cuts:
            own = await router.encode(text[:cut])
            answer = await router.stub.Score(text_pb2.ScoreTextRequest(items=text_items((text[:cut], text[cut:]))))
            scored = [entry.chosen.token_id for entry in answer.results[0].logprobs]
            assert whole[-len(scored) :] == scored
            # A token that is not wholly of the prompt is scored.
            before = await router.decode(whole[: -len(scored)])
            assert text[:cut].startswith(before)
            joined += len(before) < cut and len(own) + len(scored) > len(whole)
        assert joined, "no cut lies within a token: the text is badly chosen"


async def test_an_empty_prompt_is_the_beginning_of_a_text(served: Served) -> None:
    client, router = served
    answer = await router.stub.Score(text_pb2.ScoreTextRequest(items=text_items(("", "Hello"))))
    ids = await router.encode("Hello")
    assert [entry.chosen.token_id for entry in answer.results[0].logprobs] == ids
    assert answer.usage.prompt_tokens == len(ids) + 1
    await client.until_idle()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"items": []}, "items"),
        ({"items": text_items(("a", ""))}, "items[0].continuation"),
        ({"items": text_items(("a", "b"), ("hello " * 3000, "b"))}, "items[1].prompt"),
        ({"items": text_items(("a", "b")), "top_logprobs": 21}, "top_logprobs"),
        ({"items": text_items(*[("a", "b")] * 257)}, "items"),
    ],
)
async def test_bad_text_items_are_refused_by_their_public_names(
    served: Served, fields: dict[str, Any], field: str
) -> None:
    _, router = served
    refused = router.metric("requests_total", method="Score", status="INVALID_ARGUMENT")
    error = await error_of(router.stub.Score(text_pb2.ScoreTextRequest(**fields)))
    assert isinstance(error, InvalidArgument)
    assert error.field == field
    assert router.metric("requests_total", method="Score", status="INVALID_ARGUMENT") == refused + 1


async def test_a_router_without_backends_says_so_at_once() -> None:
    async with stack_of_one(return_wait_seconds=0.0) as (client, router):
        await client.admin.Drain(admin_pb2.DrainRequest())
        await router.until("backend_up", 0.0, backend=client.running.address)
        error = await error_of(router.stub.Score(text_pb2.ScoreTextRequest(items=text_items(("a", "b")))))
        assert error.reason == "NO_BACKEND"


async def test_a_deadline_at_the_router_reaches_the_backend(served: Served) -> None:
    client, router = served
    many = text_items(*[(f"{index} " + "hello " * 400, "b") for index in range(200)])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.stub.Score(text_pb2.ScoreTextRequest(items=many), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await client.until_idle()


async def test_a_client_that_gives_up_at_the_router_frees_the_backend(served: Served) -> None:
    client, router = served
    many = text_items(*[(f"{index} " + "hello " * 400, "b") for index in range(50)])
    # A client's reset at its deadline may arrive before the router's own clock has come to it: it counts as this too.
    before = router.metric("requests_total", method="Score", status="CANCELLED")
    with held_after(SOME_STEPS):
        call = router.stub.Score(text_pb2.ScoreTextRequest(items=many))
        await client.until(lambda load: load.running_requests > 0)
        call.cancel()
    await client.until_idle()
    await router.until("requests_total", before + 1, method="Score", status="CANCELLED")
    assert router.metric("num_requests_running") == 0


async def test_a_backend_killed_during_score_is_replaced_unseen() -> None:
    # float32: in bfloat16 a score depends on what else was in its steps.
    flags = ("--kv-memory", "64MiB", "--threads", "1", "--dtype", "float32")
    backends = [stack.start("generation", *flags) for _ in range(2)]
    try:
        for one in backends:
            await asyncio.to_thread(one.wait_ready)
        async with running_router(backend=tuple(one.address for one in backends)) as router:
            pairs = [(f"{index} " + "hello " * 100, " world") for index in range(16)]
            message = text_pb2.ScoreTextRequest(items=text_items(*pairs))
            expected = await router.stub.Score(message)
            asked = [router.metric("backend_requests_total", backend=one.address) for one in backends]
            for one in backends:
                one.popen.send_signal(signal.SIGSTOP)
            call = asyncio.ensure_future(router.stub.Score(message))

            def busy() -> list[stack.Process]:
                now = [router.metric("backend_requests_total", backend=one.address) for one in backends]
                return [one for one, before, after in zip(backends, asked, now, strict=True) if after > before]

            await until(lambda: bool(busy()))
            # It has the call, or will never take it: stopped, it cannot have answered.
            await asyncio.to_thread(busy()[0].kill)
            for one in backends:
                one.popen.send_signal(signal.SIGCONT)
            answer = await call
            assert router.metric("retries_total") == 1
            for one, other in zip(expected.results, answer.results, strict=True):
                assert abs(one.logprob - other.logprob) < 1e-3
    finally:
        for one in backends:
            one.kill()
            one.log.unlink(missing_ok=True)


async def test_the_python_client_scores(served: Served) -> None:
    _, router = served

    def synchronous() -> list[float]:
        with SyncClient(router.server.address) as client:
            return [score.logprob for score in client.score(GREETINGS).scores]

    async with AsyncClient(router.server.address) as client:
        answer = await client.score(GREETINGS, top_logprobs=1)
    assert [score.logprob for score in answer.scores] == pytest.approx(await asyncio.to_thread(synchronous), abs=1e-3)
    assert answer.scores[0].tokens[0].text == ","
    assert answer.usage.prompt_tokens > 0
