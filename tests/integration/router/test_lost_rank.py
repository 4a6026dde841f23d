"""A model in two processes loses one: its streams go on elsewhere, exactly, and what is left of it ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio
from factories.servers.failing_engines import FailingEngine, failing_engines, owner, router_before
from factories.servers.held_backend import WANT_IDS, stop_after
from factories.servers.router import PATIENCE_SECONDS, collect, generate
from penstock.v1 import config_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("lost rank")]
TOKENS = 100


@pytest_asyncio.fixture(loop_scope="module")
async def engines() -> AsyncIterator[list[FailingEngine]]:
    """Two of two processes each."""
    async with failing_engines(2, "--tensor-parallel", "2", "--threads", "2", "--dtype", "float32") as made:
        yield made


def other_rank(engine: FailingEngine) -> psutil.Process:
    """Process that has a part of the engine's model."""
    (found,) = (
        child
        for child in psutil.Process(engine.process.popen.pid).children()
        if "penstock.generation.parallel.worker" in child.cmdline()
    )
    return found


@pytest.mark.parametrize("sampling", ["greedy", pytest.param("seeded", marks=pytest.mark.slow)])
async def test_a_killed_rank_costs_no_token(engines: list[FailingEngine], sampling: str) -> None:
    config = config_pb2.GenerationConfig(max_new_tokens=TOKENS)
    if sampling == "seeded":
        config.do_sample, config.seed = True, 7
    asked = generate("Count from 1 to 20.", config=config, stop=config_pb2.StopConfig(ignore_eos=True), output=WANT_IDS)
    # The process tells of its broken step, and its end is the verdict, however long it takes: no clock's.
    async with router_before(engines, death_verdict_seconds=PATIENCE_SECONDS) as router:
        wanted = await collect(router.stub.Generate(asked))
        lost: list[FailingEngine] = []

        async def kill() -> None:
            lost.append(owner(router, engines))
            other_rank(lost[0]).kill()

        answer = await collect(router.stub.Generate(asked), stop_after(20, kill))
        assert (answer.ids(), answer.text()) == (wanted.ids(), wanted.text())
        assert answer.finished.attempts == 2
        assert await lost[0].exit_code() == 1
    assert "rank 1 of 2 has ended" in lost[0].process.output()
    # The other one drains, with its rank, which a terminal's Ctrl-C reaches as well.
    left = next(one for one in engines if one is not lost[0])
    rank = other_rank(left)
    rank.send_signal(signal.SIGINT)
    rank.send_signal(signal.SIGTERM)
    left.process.popen.send_signal(signal.SIGTERM)
    assert await left.exit_code() == 0
    assert not rank.is_running()


@pytest.mark.slow
async def test_an_idle_process_ends_with_its_rank_and_a_rank_with_its_process(engines: list[FailingEngine]) -> None:
    one, two = engines
    rank = other_rank(two)
    other_rank(one).kill()
    assert await one.exit_code() == 1
    two.process.popen.kill()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, [rank], 60)
    assert (gone, alive) == ([rank], [])
