"""Cache events in vLLM's protocol: what a gateway makes of them is what the engine has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from factories.engine.fake_engine import engine_config, make_engine, request, run
from penstock.compat.vllm import kv_events
from penstock.compat.vllm.engine_servicer import VllmEngineServicer
from penstock.compat.vllm.kv_events import KvEventLog, KvEventStream
from penstock.engines.smg_common_pb2 import KvEventBatch, SubscribeKvEventsRequest
from penstock.generation.engine.engine import Engine
from penstock.router.backends.prefix_index import PrefixIndex, routing_hashes
from penstock.router.engines.engine_blocks import EngineBlocks

PROMPT = list(range(40))


class Gateway:
    """A reader of an engine's events, from the beginning."""

    def __init__(self, engine: Engine) -> None:
        hub: Any = None
        self._size = engine.config.block_size
        log = KvEventLog(self._size)
        log.follow(engine)
        self._stream = KvEventStream(log, hub)

    @property
    def batches(self) -> list[KvEventBatch]:
        """Return what it was told so far."""
        self._stream._collect()
        return list(self._stream._batches)

    def matched(self) -> int:
        """Leading blocks of the prompt that it believes to be there."""
        blocks, index = EngineBlocks(self._size, 1000), PrefixIndex(1000)
        for batch in self.batches:
            blocks.take(batch)
        told = blocks.changes()
        assert told is not None
        index.take(told.kept, told.gone, begins_anew=True)
        return index.match(routing_hashes(PROMPT, self._size, "", 100))


def collected(make: Callable[[Engine], None]) -> Gateway:
    """A gateway that followed an engine meanwhile."""
    engine, _ = make_engine(engine_config(num_blocks=20))
    gateway = Gateway(engine)
    make(engine)
    return gateway


def test_a_prompt_is_there_until_its_blocks_are_evicted() -> None:
    def ask(engine: Engine) -> None:
        run(engine, request(PROMPT))

    there = collected(ask)
    assert there.matched() == 10
    ids = {tuple(block.token_ids) for batch in there.batches for event in batch.events for block in event.stored.blocks}
    assert tuple(PROMPT[:4]) in ids

    def evict(engine: Engine) -> None:
        run(engine, request(PROMPT))
        run(engine, request(range(100, 168)))

    assert collected(evict).matched() < 10


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_a_prompt_that_comes_back_from_the_host_pool_is_told_again(num_host_blocks: int) -> None:
    engine, _ = make_engine(engine_config(num_blocks=20, num_host_blocks=num_host_blocks))
    gateway = Gateway(engine)
    run(engine, request(PROMPT))
    run(engine, request(range(100, 168)))
    assert gateway.matched() < 10
    run(engine, request(PROMPT))
    assert (engine.stats.host_prefix_hit_tokens > 0) is bool(num_host_blocks)
    assert gateway.matched() == 10


def test_a_salted_prompt_is_not_told() -> None:
    engine, _ = make_engine(engine_config())
    gateway = Gateway(engine)
    run(engine, request(PROMPT, cache_salt="a tenant"))
    assert not gateway.batches


def test_when_too_much_waits_the_cache_is_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_MOST_PENDING", 5)

    def fill(engine: Engine) -> None:
        run(engine, request(PROMPT))
        run(engine, request([*PROMPT[:8], 7, 7, 7, 7, 7], max_new_tokens=1))

    gateway = collected(fill)
    kinds = [event.WhichOneof("data") for batch in gateway.batches for event in batch.events]
    assert kinds[0] == "cleared"


async def test_events_are_noted_for_others_when_the_first_reader_leaves_at_once() -> None:
    engine, _ = make_engine(engine_config())
    posted: Future[None] = Future()
    loop = SimpleNamespace(run_on_engine=lambda _: posted)
    core = SimpleNamespace(loaded=SimpleNamespace(engine=engine), hub=None, loop=loop)
    lifecycle: Any = SimpleNamespace(loaded=lambda: core, num_loads=1)
    nothing: Any = None
    events = VllmEngineServicer(lifecycle, nothing).SubscribeKvEvents(SubscribeKvEventsRequest(), nothing)
    reading = asyncio.ensure_future(anext(events))
    # Before the engine's thread is between two steps.
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert not posted.cancelled()
