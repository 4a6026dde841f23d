"""Backends that die, freeze or lie: the client sees points 1, 2, 3 and 7 of the contract."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import EmittingBackend
from factories.servers.held_backend import IDS, TOKENS, WANT_IDS, held, status_of, stop_after
from factories.servers.only_route import only_route
from factories.servers.plain_server import starting_service
from factories.servers.router import Answer, collect, generate, running_router, until
from factories.wire.tcp_proxy import TcpProxy
from penstock.common.errors import from_rpc_error
from penstock.v1 import common_pb2, config_pb2, generation_pb2


def owner(*backends: EmittingBackend) -> EmittingBackend:
    """Find the backend that runs a request."""
    return next(one for one in backends if one.running)


async def first_owner(*backends: EmittingBackend) -> EmittingBackend:
    """Wait for and return the first backend that runs a request."""
    waits = [asyncio.ensure_future(one.until(lambda one=one: one.running > 0)) for one in backends]  # type: ignore[misc]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return owner(*backends)


async def test_backend_that_dies_before_the_first_token_is_replaced_unseen() -> None:
    async with held() as one, held() as two, running_router(one, two) as router:
        answer = asyncio.ensure_future(collect(router.stub.Generate(generate(output=WANT_IDS))))
        dead = await first_owner(one, two)
        await (two if dead is one else one).allow(None)
        await dead.stop()
        result = await answer
        assert result.ids() == IDS
        assert result.finished.attempts == 2
        assert router.metric("retries_total") == 1
        assert router.metric("moves_total") == 0


async def test_stream_moves_when_its_backend_dies_and_loses_nothing() -> None:
    async with held(allowance=5) as one, held(allowance=5) as two, running_router(one, two) as router:

        async def kill() -> None:
            dead = owner(one, two)
            await dead.stop()
            await (two if dead is one else one).allow(None)

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), stop_after(5, kill))
        assert answer.ids() == IDS
        assert answer.text() == await router.decode(IDS)
        assert router.metric("moves_total") == 1
        first, second = one.submitted + two.submitted
        first, second = sorted((first, second), key=lambda request: request.attempt_epoch)
        assert (first.attempt_epoch, second.attempt_epoch) == (0, 1)
        assert second.seed == first.seed
        assert list(second.prompt_token_ids) == list(first.prompt_token_ids)
        assert list(second.resumed_token_ids[0].ids) == IDS[:5]


async def test_every_sequence_of_a_request_moves() -> None:
    async with held(allowance=4) as one, held(allowance=4) as two, running_router(one, two) as router:

        async def kill() -> None:
            dead = owner(one, two)
            await dead.stop()
            await (two if dead is one else one).allow(None)

        config = config_pb2.GenerationConfig(num_return_sequences=2, do_sample=True)
        answer = await collect(router.stub.Generate(generate(config=config, output=WANT_IDS)), stop_after(6, kill))
        assert answer.ids(0) == answer.ids(1) == IDS


async def test_ok_without_finished_is_a_loss() -> None:
    async with held(allowance=5) as one, held(allowance=5) as two, running_router(one, two) as router:

        async def end() -> None:
            liar = owner(one, two)
            await (two if liar is one else one).allow(None)
            await liar.end_sessions()

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), stop_after(5, end))
        assert answer.ids() == IDS


async def test_frozen_backend_is_lost_after_the_stall_timeout() -> None:
    async with (
        held(allowance=5) as one,
        held(allowance=5) as two,
        running_router(one, two, stall_timeout_seconds=3.0) as router,
    ):

        async def freeze() -> None:
            frozen = owner(one, two)
            await frozen.freeze()
            await (two if frozen is one else one).allow(None)

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), stop_after(5, freeze))
        assert answer.ids() == IDS


async def test_backend_cut_off_from_the_network_is_lost() -> None:
    async with held(allowance=5) as one, held() as two, TcpProxy(one.address) as proxy:
        two.extra_load = 100
        addresses = (proxy.address, two.address)
        async with running_router(backend=addresses, stall_timeout_seconds=3.0) as router:

            async def cut() -> None:
                proxy.freeze()
                await two.allow(None)

            answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), stop_after(5, cut))
            assert answer.ids() == IDS
            proxy.thaw()


async def test_frames_that_are_missing_are_noticed() -> None:
    async with held(allowance=None) as one, running_router(one) as router:
        dropped = 0

        def drop_third(message: generation_pb2.SessionResponse) -> generation_pb2.SessionResponse:
            nonlocal dropped
            if any(event.delta.seq == 3 for event in message.events) and not dropped:
                dropped += 1
                return generation_pb2.SessionResponse()
            return message

        one.distort = drop_third
        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)))
        assert (answer.ids(), dropped) == (IDS, 1)
        assert answer.finished.attempts == 2


async def test_rows_that_are_cut_short_cost_the_backend_its_session() -> None:
    async with held(allowance=None, uses_handles=False) as one, running_router(one) as router:
        distorted = 0

        def cut(message: generation_pb2.SessionResponse) -> generation_pb2.SessionResponse:
            nonlocal distorted
            if any(event.delta.seq == 3 for event in message.events) and not distorted:
                distorted += 1
                message.events.add().tokens.handles.append(1)
            return message

        one.distort = cut
        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)))
        assert (answer.ids(), distorted) == (IDS, 1)
        assert answer.finished.attempts == 2


async def test_a_backend_without_handles_is_understood() -> None:
    async with held(allowance=None, uses_handles=False) as one, running_router(one) as router:
        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)))
        assert (answer.ids(), answer.finished.attempts) == (IDS, 1)


@pytest.mark.parametrize("takes", [True, False])
async def test_requests_that_come_together_share_a_message_where_the_backend_takes_it(takes: bool) -> None:
    async with held(allowance=None, takes_commands=takes) as one, running_router(one) as router:
        streams = [collect(router.stub.Generate(generate(output=WANT_IDS))) for _ in range(24)]
        answers = await asyncio.gather(*streams)
        assert all(answer.ids() == IDS for answer in answers)
        assert len(one.submitted) == 24
        assert one.messages < 24 if takes else one.messages >= 24


async def test_frames_of_another_epoch_are_dropped() -> None:
    async with held(allowance=None) as one, running_router(one) as router:

        def add_stale(message: generation_pb2.SessionResponse) -> generation_pb2.SessionResponse:
            for event in list(message.events):
                if event.HasField("delta"):
                    stale = message.events.add()
                    stale.CopyFrom(event)
                    stale.attempt_epoch += 7
                    stale.delta.token_ids[0] = 999
            message.events.add(request_id="nobody's").delta.token_ids.append(1)
            message.events.add(tokens={"handles": [999], "seqs": [0], "token_ids": [1]})
            return message

        one.distort = add_stale
        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)))
        assert answer.ids() == IDS
        assert router.metric("stale_frames_total") >= TOKENS


async def test_finished_too_early_is_not_accepted() -> None:
    async with held(allowance=None) as one, running_router(one, max_attempts=1) as router:

        def finish_at_once(message: generation_pb2.SessionResponse) -> generation_pb2.SessionResponse:
            for event in message.events:
                if event.HasField("started"):
                    event.finished.SetInParent()
            return message

        one.distort = finish_at_once
        code, error = await status_of(router.stub.Generate(generate()))
        assert (code, error.reason) == (grpc.StatusCode.INTERNAL, "BACKEND_PROTOCOL")


async def test_lost_for_good_after_tokens_is_aborted_with_last_seq() -> None:
    async with held(allowance=5) as one, running_router(one, failover_wait_seconds=0.1) as router:
        seen: list[int] = []

        async def note(answer: Answer) -> None:
            seen.append(answer.deltas[-1].seq)
            if len(answer.ids()) == 5:
                await one.stop()

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(router.stub.Generate(generate(output=WANT_IDS)), note)
        error = from_rpc_error(caught.value)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert error.metadata["last_seq"] == str(seen[-1])


async def test_lost_for_good_before_the_first_token_is_unavailable() -> None:
    async with held() as one, running_router(one, failover_wait_seconds=0.1) as router:
        failing = asyncio.ensure_future(status_of(router.stub.Generate(generate())))
        await one.until(lambda: one.running == 1)
        await one.stop()
        code, error = await failing
        assert code is grpc.StatusCode.UNAVAILABLE
        assert error.retry_after_seconds


async def test_a_process_that_does_not_serve_yet_is_known_to_start() -> None:
    """Lost requests wait for it as long as a start may take: tests/unit/router/backends/test_patience.py."""
    async with (
        held(allowance=5) as one,
        starting_service() as starting,
        TcpProxy(one.address) as proxy,
        running_router(one, backend=(proxy.address,)) as router,
    ):
        app: Any = router.server.service

        async def restart() -> None:
            assert not only_route(app).pool.is_any_starting(one.model)
            await proxy.cut()
            proxy.lead_to(starting.address)
            await proxy.restore()
            await until(lambda: only_route(app).pool.is_any_starting(one.model))
            assert not only_route(app).pool.is_any_starting("another")
            await one.allow(None)
            await proxy.cut()
            proxy.lead_to(one.address)
            await proxy.restore()
            await until(lambda: not only_route(app).pool.is_any_starting(one.model))

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), stop_after(5, restart))
        assert answer.ids() == IDS


async def test_only_so_many_moves() -> None:
    async with held(allowance=5) as one, running_router(one, max_moves=2) as router:

        def drop_one_in_eight(message: generation_pb2.SessionResponse) -> generation_pb2.SessionResponse:
            return generation_pb2.SessionResponse() if message.step % 8 == 7 else message

        one.distort = drop_one_in_eight
        # Nothing is lost before the client has ids: those that the router still holds are no begun stream.
        call = router.stub.Generate(generate(output=WANT_IDS))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call, stop_after(5, lambda: one.allow(None)))
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert [request.attempt_epoch for request in one.submitted] == [0, 1, 2]


async def test_request_that_kills_two_backends_is_not_tried_a_third_time() -> None:
    async with held() as one, held() as two, held() as three, running_router(one, two, three) as router:
        backends = [one, two, three]
        failing = asyncio.ensure_future(status_of(router.stub.Generate(generate())))
        for _ in range(2):
            dead = await first_owner(*backends)
            backends.remove(dead)
            await dead.stop()
        code, error = await failing
        assert (code, error.reason) == (grpc.StatusCode.INTERNAL, "POISON")
        assert not backends[0].submitted


async def test_backends_that_were_stopped_are_no_deaths() -> None:
    """A rolling restart whose grace is shorter than the stream: every backend that ran it went, and it is no poison."""
    async with held() as one, held() as two, held() as three, running_router(one, two, three) as router:
        backends = [one, two, three]
        answering = asyncio.ensure_future(collect(router.stub.Generate(generate(output=WANT_IDS))))
        for _ in range(2):
            leaving = await first_owner(*backends)
            await leaving.allow(5)
            await leaving.until(lambda leaving=leaving: leaving.allowance == 0)  # type: ignore[misc]
            backends.remove(leaving)
            # Only its load report shows this: a change of health may arrive before it.
            leaving.draining = True
            await leaving.notify()
            await router.until("backend_up", 0, backend=leaving.address)
            await leaving.stop()
        await backends[0].allow(None)
        answer = await answering
        assert answer.ids() == IDS
        assert answer.finished.attempts == 3


async def test_sixty_four_streams_survive_the_death_of_one_of_two_backends() -> None:
    async with held() as one, held() as two, running_router(one, two) as router:
        streams = [
            asyncio.ensure_future(collect(router.stub.Generate(generate(f"number {index}", output=WANT_IDS))))
            for index in range(64)
        ]
        await one.until(lambda: one.running >= 16)
        for each in (one, two):
            await each.allow(10)
        await one.until(lambda: one.allowance == 0)
        await one.stop()
        await two.allow(None)
        answers = await asyncio.gather(*streams)
        assert all(answer.ids() == IDS for answer in answers)


async def test_moved_stream_still_has_the_timings_of_its_last_backend() -> None:
    async with held(allowance=5) as one, held(allowance=5) as two, running_router(one, two) as router:

        async def kill() -> None:
            dead = owner(one, two)
            await dead.stop()
            await (two if dead is one else one).allow(None)

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), stop_after(5, kill))
        assert answer.finished.attempts == 2
        assert answer.finished.timings.HasField("decode_seconds")
        assert answer.finished.usage.completion_tokens == TOKENS


async def test_sequences_that_had_ended_are_not_waited_for_after_a_move() -> None:
    async with held(allowance=8) as one, held(allowance=8) as two, running_router(one, two) as router:
        for each in (one, two):
            each.distort = end_second_sequence_after_three

        async def kill() -> None:
            dead = owner(one, two)
            await dead.stop()
            await (two if dead is one else one).allow(None)

        config = config_pb2.GenerationConfig(num_return_sequences=2, do_sample=True)
        answer = await collect(router.stub.Generate(generate(config=config, output=WANT_IDS)), stop_after(10, kill))
        assert (answer.ids(0), answer.ids(1)) == (IDS, IDS[:3])
        assert [result.token_count for result in answer.finished.sequences] == [TOKENS, 3]


def end_second_sequence_after_three(message: generation_pb2.SessionResponse) -> generation_pb2.SessionResponse:
    """End sequence 1 with its third token; later messages are those of a backend that resumed it."""
    for event in message.events:
        if event.HasField("delta") and event.delta.index == 1 and list(event.delta.token_ids) == [IDS[2]]:
            event.delta.finished.index = 1
            event.delta.finished.token_count = 3
            event.delta.finished.finish_reason = common_pb2.FINISH_REASON_STOP_EOS
    return message
