"""Backends that refuse: which requests fail, and which go to another backend."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from factories.servers.held_backend import IDS, WANT_IDS, held, status_of, stop_after
from factories.servers.only_route import only_route
from factories.servers.router import Answer, collect, generate, running_router, tokenizer_address, until
from factories.wire.tcp_proxy import TcpProxy
from penstock.common.errors import InvalidArgument, ResourceExhausted, Unavailable, from_rpc_error


async def test_backend_that_refuses_as_unavailable_is_passed_over() -> None:
    async with held(allowance=None) as one, held(allowance=None) as two, running_router(one, two) as router:
        one.refuse = Unavailable("draining", reason="DRAINING")
        answers = [await collect(router.stub.Generate(generate(output=WANT_IDS))) for _ in range(4)]
        assert all(answer.ids() == IDS for answer in answers)
        assert one.submitted
        assert two.steps


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (InvalidArgument("config.top_p", "must be in [0, 1]"), grpc.StatusCode.INVALID_ARGUMENT),
        (ResourceExhausted("full", reason="QUEUE_FULL", retry_after_seconds=2), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_refusals_pass_through_and_say_nothing_about_health(refusal: Any, code: grpc.StatusCode) -> None:
    async with held(allowance=None) as one, running_router(one) as router:
        one.refuse = refusal
        got, error = await status_of(router.stub.Generate(generate()))
        assert (got, error.reason, error.field) == (code, refusal.reason, refusal.field)
        assert error.retry_after_seconds == refusal.retry_after_seconds
        assert len(one.submitted) == 1
        one.refuse = None
        assert (await collect(router.stub.Generate(generate(output=WANT_IDS)))).ids() == IDS


async def test_stream_waits_for_room_at_the_backend_that_is_left() -> None:
    full = {"max_queued": 1, "extra_load": 1}
    async with held(allowance=5) as one, held(allowance=None, **full) as two, running_router(one, two) as router:

        async def kill() -> None:
            await one.stop()
            await router.until("backend_up", 0, backend=one.address)
            two.extra_load = 0
            await two.notify()

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), stop_after(5, kill))
        assert answer.ids() == IDS


async def test_stream_that_has_begun_is_not_shed_by_the_backend_it_moves_to() -> None:
    async with held(allowance=5) as one, held(extra_load=100) as two, running_router(one, two) as router:
        two.refuse = ResourceExhausted("full", reason="QUEUE_FULL", retry_after_seconds=2)
        call = router.stub.Generate(generate(output=WANT_IDS))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call, stop_after(5, one.stop))
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert from_rpc_error(caught.value).metadata["last_seq"]


async def test_retries_keep_to_their_budget() -> None:
    async with held() as one, running_router(one, retry_budget_burst=1) as router:
        one.refuse = Unavailable("draining", reason="DRAINING")
        await status_of(router.stub.Generate(generate()))
        await status_of(router.stub.Generate(generate()))
        assert router.metric("retries_total") == 1


async def test_what_no_backend_can_go_on_with_is_aborted() -> None:
    """Ids that were cut off within a beam's answer, say: resumed_token_ids is no field of the client's."""
    refusal = InvalidArgument("resumed_token_ids", "beam modes return whole sequences only")
    first, second = held(allowance=3), held(extra_load=100, refuse=refusal)
    async with first as one, second as two, running_router(one, two) as router:
        last_seq = -1

        async def cut_off(answer: Answer) -> None:
            nonlocal last_seq
            last_seq = answer.deltas[-1].seq
            if sum(len(delta.token_ids) for delta in answer.deltas) == 3:
                await one.stop()

        # Only when the client has them all: ids that the router still holds are no begun stream.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(router.stub.Generate(generate(output=WANT_IDS)), cut_off)
        error = from_rpc_error(caught.value)
        assert (caught.value.code(), error.reason) == (grpc.StatusCode.ABORTED, "BACKEND_LOST")
        assert error.metadata["last_seq"] == str(last_seq)


async def test_what_was_lost_before_the_client_saw_any_of_it_is_unavailable() -> None:
    """The router had ids, but had not written them: the client may simply ask again."""
    refusal = InvalidArgument("resumed_token_ids", "beam modes return whole sequences only")
    first, second = held(allowance=0), held(extra_load=100, refuse=refusal)
    async with first as one, second as two, TcpProxy(tokenizer_address()) as proxy:
        async with running_router(one, two, tokenizer=proxy.address, detokenize="tokenizer") as router:
            failing = asyncio.ensure_future(status_of(router.stub.Generate(generate(output=WANT_IDS))))
            await one.until(lambda: one.running == 1)
            proxy.freeze()
            await one.allow(3)
            # A backend's messages are lost with it unless they were read.
            service: Any = router.server.service
            await until(lambda: only_route(service).flow._parts.detokenizer.outstanding > 0)
            await one.stop()
            code, error = await failing
        assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "BACKEND_LOST")
