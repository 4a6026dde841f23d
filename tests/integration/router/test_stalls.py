"""Backends that seem to live: their reports go on, and the Session, or the engine behind it, does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from factories.servers.emitting_backend import EmittingBackend
from factories.servers.held_backend import IDS, WANT_IDS, held, stop_after
from factories.servers.router import (
    PATIENCE_SECONDS,
    backend,
    chat,
    collect,
    generate,
    running_router,
    tokenizer_address,
    until,
)
from factories.wire.tcp_proxy import TcpProxy
from penstock.common.errors import Internal

STALL_SECONDS = 3.0


@contextlib.asynccontextmanager
async def reporting(one: EmittingBackend, *, steps: bool) -> AsyncIterator[None]:
    """Let a backend's load change all the time: its queue, and its steps when `steps`."""

    async def report() -> None:
        while True:
            one.extra_load = 1 - one.extra_load
            one.steps += steps
            await asyncio.sleep(0.02)

    task = asyncio.ensure_future(report())
    try:
        yield
    finally:
        task.cancel()


@contextlib.asynccontextmanager
async def beating(one: EmittingBackend, seconds: float) -> AsyncIterator[None]:
    """Let a backend send a heartbeat every so often, from its first request on."""

    async def beat() -> None:
        await one.until(lambda: one.running > 0)
        while True:
            await one.beat()
            await asyncio.sleep(seconds)

    task = asyncio.ensure_future(beat())
    try:
        yield
    finally:
        task.cancel()


@pytest.mark.parametrize("steps", [False, True], ids=["engine hangs", "session dark"])
async def test_reports_are_no_sign_of_life_of_a_session(steps: bool) -> None:
    async with (
        held(allowance=5) as one,
        held(extra_load=100) as two,
        running_router(one, two, stall_timeout_seconds=STALL_SECONDS) as router,
    ):
        async with reporting(one, steps=steps):
            answer = await collect(
                router.stub.Generate(generate(output=WANT_IDS)), stop_after(5, lambda: two.allow(None))
            )
        assert answer.ids() == IDS
        assert router.metric("backend_losses_total", backend=one.address) == 1


async def test_heartbeats_keep_a_backend_whose_step_takes_longer_than_the_timeout() -> None:
    """Both ends are in this process: when it is stopped, no look at the silence is taken."""
    stall = 2.0
    async with (
        held(allowance=5) as one,
        held(extra_load=100) as two,
        running_router(one, two, stall_timeout_seconds=stall) as router,
        beating(one, stall / 40),
    ):

        async def take_long() -> None:
            await asyncio.sleep(1.5 * stall)
            await one.allow(None)

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), stop_after(5, take_long))
        assert (answer.ids(), answer.finished.attempts) == (IDS, 1)
        assert router.metric("backend_losses_total", backend=one.address) == 0


@pytest.mark.parametrize("said", [b"", b"/penstock.v1.GenerationService/Session"], ids=["black hole", "session dark"])
async def test_a_connection_that_lets_nothing_through_costs_the_backend(said: bytes) -> None:
    """The Session has a connection of its own (asyncio transport)."""
    async with held(allowance=5) as one, held(extra_load=100) as two, TcpProxy(one.address) as proxy:
        addresses = (proxy.address, two.address)
        async with running_router(
            backend=addresses, transport="asyncio", stall_timeout_seconds=STALL_SECONDS
        ) as router:

            async def freeze() -> None:
                proxy.freeze(said)
                await two.allow(None)

            async with reporting(one, steps=True):
                answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), stop_after(5, freeze))
            assert answer.ids() == IDS
            proxy.thaw()


async def test_streams_of_a_broken_engine_move() -> None:
    async with held(allowance=5) as one, held(allowance=5) as two, running_router(one, two) as router:

        async def fail() -> None:
            broken = next(each for each in (one, two) if each.running)
            other = two if broken is one else one
            for session in broken.sessions:
                session.break_off(Internal("a step failed", reason="STEP_FAILED"))
            await broken.notify()
            await other.allow(None)

        answer = await collect(router.stub.Generate(generate(output=WANT_IDS)), stop_after(5, fail))
        assert answer.ids() == IDS
        assert answer.finished.attempts == 2


async def test_a_stopped_tokenizer_costs_a_request_its_bound_and_no_more() -> None:
    """Without a deadline. The time is the router's own: a tokenizer that is frozen cannot be waited for otherwise."""
    async with (
        TcpProxy(tokenizer_address()) as proxy,
        backend() as one,
        running_router(one, tokenizer=proxy.address, tokenizer_stall_seconds=1.0, tokenizer_wait_seconds=2.0) as router,
    ):
        proxy.freeze()
        with pytest.raises(Exception, match="tokenizer cannot be reached"):
            await asyncio.wait_for(collect(router.stub.Chat(chat())), 20)
        proxy.thaw()


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
async def test_a_request_at_a_stopped_tokenizer_moves_to_another(transport: str) -> None:
    async with (
        TcpProxy(tokenizer_address()) as proxy,
        backend() as one,
        running_router(
            one,
            tokenizer=(proxy.address, tokenizer_address()),
            transport=transport,
            tokenizer_stall_seconds=2.0,
        ) as router,
    ):
        proxy.freeze()
        # Without another one it would end when the router's wait for it does, in half of this time.
        answer = await asyncio.wait_for(collect(router.stub.Chat(chat())), 2 * PATIENCE_SECONDS)
        assert answer.finished
        await until(lambda: router.metric("tokenizer_up") == 1)
        proxy.thaw()
