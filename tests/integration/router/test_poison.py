"""POISON ends the request that kills backends, and nobody beside it; a connection that ends is no crash."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import count_up
from factories.servers.held_backend import IDS, WANT_IDS, held, stop_after
from factories.servers.router import PATIENCE_SECONDS, Answer, Router, collect, generate, running_router, until
from factories.wire.tcp_proxy import TcpProxy
from penstock.common.errors import PenstockError, from_rpc_error
from penstock.v1 import config_pb2, generation_pb2

KILLER = 666
LONG = 120
LONG_IDS = list(count_up(LONG)(None))  # type: ignore[arg-type]
# On a slow machine suspects wait long for their probations, and it is long until a lost connection is back.
PATIENT = {"quarantine_wait_seconds": PATIENCE_SECONDS, "isolation_wait_seconds": PATIENCE_SECONDS}
UNCONFIRMED = {"death_verdict_seconds": PATIENCE_SECONDS}


class Mortal:
    """Backend whose process dies of one request, once that has `tokens`, and is started again."""

    def __init__(self, tokens: int) -> None:
        # Long answers: where a killer is on probation, others run.
        self.backend = held(allowance=None, step_seconds=0.002, script=count_up(LONG))
        self.backend.distort = self._watch
        self.crashes = 0
        self._tokens = tokens
        self._dying: asyncio.Task[None] | None = None

    def _watch(self, message: generation_pb2.SessionResponse) -> generation_pb2.SessionResponse:
        """Die instead of sending, when the killer has its tokens."""
        for session in self.backend.sessions:
            for running in session.running.values():
                made = running.next_seq if running.started else 0
                if running.request.seed == KILLER and made > self._tokens and self._dying is None:
                    self._dying = asyncio.ensure_future(self._die())
        return message if self._dying is None else generation_pb2.SessionResponse()

    async def _die(self) -> None:
        self.crashes += 1
        await self.backend.stop()
        self._dying = None
        await self.backend.start()


@asynccontextmanager
async def mortals(count: int, tokens: int) -> AsyncIterator[tuple[Router, list[Mortal]]]:
    """Run a router before backends that die of the killer."""
    all_of_them = [Mortal(tokens) for _ in range(count)]
    for one in all_of_them:
        await one.backend.start()
    try:
        # Many die in a row, which is no reason to keep the new processes out.
        backends = [one.backend for one in all_of_them]
        habits = {"eject_consecutive_failures": 0, "retry_budget_burst": 10_000, **PATIENT}
        async with running_router(*backends, **habits) as router:
            yield router, all_of_them
    finally:
        for one in all_of_them:
            await one.backend.stop()


async def ending_of(call: Any) -> Answer | PenstockError:
    """Return a stream's answer, or its error."""
    try:
        return await collect(call)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("tokens", [0, 3], ids=["at once", "after its third token"])
@pytest.mark.parametrize("count", [2, 3])
async def test_twenty_of_twenty_killers_are_found_and_no_neighbour(count: int, tokens: int) -> None:
    async with mortals(count, tokens) as (router, backends):
        killed = config_pb2.GenerationConfig(seed=KILLER)
        for round_ in range(20):
            beside = [
                asyncio.ensure_future(ending_of(router.stub.Generate(generate(f"{round_} {index}", output=WANT_IDS))))
                for index in range(8)
            ]
            killer = await ending_of(router.stub.Generate(generate("kill", config=killed, output=WANT_IDS)))
            assert isinstance(killer, PenstockError)
            assert (killer.code, killer.reason) == (grpc.StatusCode.INTERNAL, "POISON")
            for neighbour in await asyncio.gather(*beside):
                assert isinstance(neighbour, Answer), neighbour
                assert neighbour.ids() == LONG_IDS
        assert router.metric("poisoned_requests_total") == 20
        assert sum(one.crashes for one in backends) == 40


async def test_two_backends_that_die_by_themselves_make_nobody_poison() -> None:
    """Several requests were on both, but each ran apart between the crashes, and all end well."""
    one, two = held(script=count_up(LONG)), held(script=count_up(LONG), extra_load=100)
    async with one, two, running_router(one, two, **PATIENT) as router:
        streams = [
            asyncio.ensure_future(collect(router.stub.Generate(generate(f"{index}", output=WANT_IDS))))
            for index in range(6)
        ]
        await one.until(lambda: one.running == 6)
        for dying, other in ((one, two), (two, one)):
            # Before it dies, each that came back has done more there than where it was lost.
            await dying.allow(5)
            await dying.until(lambda dying=dying: dying.allowance == 0)  # type: ignore[misc]
            await dying.stop()
            # One by one: the next when the last has a token more than it was lost with.
            for arrived in range(1, 7):
                await other.until(lambda other=other, arrived=arrived: other.running == arrived)  # type: ignore[misc]
                await other.allow(6)
                await other.until(lambda other=other: other.allowance == 0)  # type: ignore[misc]
            if dying is one:
                await one.start()
                await router.until("backend_up", 1.0, backend=one.address)
        await one.allow(None)
        answers = await asyncio.gather(*streams)
        assert all(answer.ids() == LONG_IDS for answer in answers)
        assert router.metric("poisoned_requests_total") == 0


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one after the other"])
async def test_connections_that_are_reset_are_no_crashes(at_once: bool) -> None:
    async with (
        held(allowance=5) as one,
        held(allowance=5) as two,
        TcpProxy(one.address) as a,
        TcpProxy(two.address) as b,
        running_router(backend=(a.address, b.address), **UNCONFIRMED) as router,
    ):
        streams = [
            asyncio.ensure_future(collect(router.stub.Generate(generate(f"{index}", output=WANT_IDS))))
            for index in range(40)
        ]
        await until(lambda: one.allowance == two.allowance == 0 and one.running + two.running == 40)
        a.reset()
        if not at_once:
            # Those of the first are on the second when that is reset.
            await two.until(lambda: two.running == 40)
        b.reset()
        for each in (one, two):
            await each.allow(None)
        answers = await asyncio.gather(*streams)
        assert all(answer.ids() == IDS for answer in answers)
        assert router.metric("poisoned_requests_total") == 0


async def test_a_lone_stream_whose_connections_are_reset_goes_on() -> None:
    async with (
        held(allowance=5) as one,
        held(allowance=5) as two,
        TcpProxy(one.address) as a,
        TcpProxy(two.address) as b,
        running_router(backend=(a.address, b.address), **UNCONFIRMED) as router,
    ):

        async def reset() -> None:
            for _ in range(2):
                for backend, proxy in ((one, a), (two, b)):
                    if backend.running and router.metric("moves_total") < 2:
                        before = router.metric("moves_total")
                        proxy.reset()
                        await router.until("moves_total", before + 1)
                        await until(lambda: one.running + two.running == 1)
            for backend in (one, two):
                await backend.allow(None)

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), stop_after(5, reset))
        assert answer.ids() == IDS
        assert answer.finished.attempts == 3
