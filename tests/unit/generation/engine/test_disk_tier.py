"""The store behind the host pool: what goes there, what comes back, and who waits for it; without a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from factories.engine.block_stores import MemoryStore, stored_engine
from factories.engine.fake_engine import Answer, FakeRunner, collect, engine_config, make_engine, request, run
from factories.engine.host_pools import HOSTS, host_fields
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.common.block_hashes import chain_hash, root_hash
from penstock.generation.core.block_store import key_of
from penstock.generation.core.cache_group import CacheGroup
from penstock.generation.core.request import Request
from penstock.generation.core.step import RunnerOutput, SchedulerOutput
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.engine import Engine

HEAD = [*range(1, 25)]
ROOMY = engine_config(num_blocks=400, max_batch_tokens=1000)


def small(**changes: Any) -> EngineConfig:
    """Pools of 12 and of 40 blocks of 4 tokens."""
    return engine_config(**{"num_blocks": 12, "max_batch_tokens": 64, "num_host_blocks": 40, **changes})


def first(**fields: Any) -> Request:
    """A request with six blocks that later ones begin with, too."""
    return request([*HEAD, 30], max_new_tokens=2, **fields)


def ids(answers: dict[str, Answer]) -> list[Any]:
    return [answer.ids for answer in answers.values()]


def fill(store: MemoryStore, config: EngineConfig | None = None, **fields: Any) -> Engine:
    """Run the first request, evict its prefix, and let the store write it."""
    engine = stored_engine(config or small(), store)
    run(engine, first(**fields))
    run(engine, request([40] * 44, max_new_tokens=2))
    settle(engine)
    return engine


def settle(engine: Engine) -> None:
    """Let the engine take what the store has done. Nothing is held then."""
    run(engine, request([2], max_new_tokens=1))
    run(engine, request([2], max_new_tokens=1))
    load = engine.load()
    assert (load.kv_blocks_used, load.host_blocks_used) == (0, 0)
    engine.check_integrity()


def test_a_prefix_comes_back_after_a_restart_with_equal_ids() -> None:
    store = MemoryStore()
    fill(store)
    assert store.num_saved >= len(HEAD) // 4
    again = stored_engine(small(), MemoryStore(store.kept))
    answers = run(again, first())
    assert ids(answers) == ids(run(make_engine(ROOMY)[0], first()))
    assert again.stats.disk_hit_tokens == again.stats.host_prefix_hit_tokens == len(HEAD)
    # Its last token and the first of the answer.
    assert again.stats.computed_tokens == 2
    settle(again)


def test_other_requests_are_computed_while_one_waits_for_its_blocks() -> None:
    kept = fill(MemoryStore())._scheduler.disk
    assert kept is not None
    store = MemoryStore(kept._store.kept)  # type: ignore[attr-defined]
    engine, waits = stored_engine(small(), store), first()
    store.is_held = True
    engine.add(waits)
    assert engine.step() == []
    assert engine.has_work
    # It holds nobody up, and an abort leaves nothing.
    other = request([40] * 8, max_new_tokens=2)
    answers: dict[str, Answer] = {}
    engine.add(other)
    for _ in range(4):
        collect(answers, engine.step())
        engine.check_integrity()
    assert answers[other.request_id].finished is not None
    assert waits.request_id not in answers
    dropped = first()
    engine.add(dropped)
    engine.step()
    engine.abort(dropped.request_id)
    store.is_held = False
    run(engine, answers=answers)
    assert answers[waits.request_id].ids == ids(run(make_engine(ROOMY)[0], first()))[0]
    assert len(store.fetched) == len(set(store.fetched)), "two requests with the same prefix read it once"
    settle(engine)


@pytest.mark.parametrize("broken", [0, 3, 5])
def test_a_block_that_is_not_what_was_written_is_computed(broken: int) -> None:
    store = MemoryStore()
    engine = fill(store)
    hashes = chain(engine)
    again = MemoryStore(store.kept)
    again.broken = {key for key in store.kept if key == key_for(hashes[broken])}
    assert again.broken
    fresh = stored_engine(small(), again)
    assert ids(run(fresh, first())) == ids(run(make_engine(ROOMY)[0], first()))
    assert fresh.stats.prefix_hit_tokens == broken * 4
    settle(fresh)


def chain(engine: Engine) -> list[bytes]:
    """Hashes of the first request's blocks."""
    item, hashes, parent = first(), list[bytes](), root_hash("")
    engine.add(item)
    (sequence,) = next(group for group in engine._scheduler.waiting).sequences
    for index in range(len(HEAD) // 4):
        parent = chain_hash(parent, sequence.block_content(index, 4))
        hashes.append(parent)
    engine.abort(item.request_id)
    engine.step()
    return hashes


def key_for(block_hash: bytes) -> bytes:
    return key_of(b"model", block_hash, 0, 0)


def test_a_tenants_prefixes_are_its_own() -> None:
    store = MemoryStore()
    fill(store, cache_salt="one")
    again = stored_engine(small(), MemoryStore(store.kept))
    run(again, first(cache_salt="other"))
    assert again.stats.disk_hit_tokens == 0
    run(again, first(cache_salt="one"))
    assert again.stats.disk_hit_tokens == len(HEAD)


def test_another_models_blocks_are_not_found() -> None:
    store = MemoryStore()
    fill(store)
    other = MemoryStore(store.kept)
    other.fingerprint = b"another"
    engine = stored_engine(small(), other)
    run(engine, first())
    assert engine.stats.disk_hit_tokens == 0


def test_what_new_weights_compute_is_found_by_nobody_else() -> None:
    store = MemoryStore()
    engine = fill(store)
    live = request([*HEAD, 31], max_new_tokens=12)
    answers: dict[str, Answer] = {}
    engine.add(live)
    collect(answers, engine.step())
    before = dict(store.kept)
    engine.weights_changed()
    # The engine's own prefixes of old weights are not found either.
    hits = engine.stats.disk_hit_tokens
    run(engine, first(), answers=answers)
    run(engine, request([41] * 44, max_new_tokens=2))
    settle(engine)
    assert engine.stats.disk_hit_tokens == hits
    assert len(store.kept) > len(before)
    # A second process that has written weights as often, and one of the old weights.
    for changes in (1, 0):
        again = stored_engine(small(), MemoryStore({key: store.kept[key] for key in store.kept if key not in before}))
        for _ in range(changes):
            again.weights_changed()
        run(again, first())
        assert again.stats.disk_hit_tokens == 0


def test_blocks_that_come_after_the_weights_changed_are_not_used() -> None:
    store = MemoryStore(dict(fill_kept()))
    engine = stored_engine(small(), store)
    store.is_held = True
    engine.add(first())
    engine.step()
    engine.weights_changed()
    store.is_held = False
    run(engine)
    assert engine.stats.disk_hit_tokens == engine.stats.prefix_hit_tokens == 0
    settle(engine)


def fill_kept() -> dict[bytes, Any]:
    store = MemoryStore()
    fill(store)
    return store.kept


def test_clearing_the_cache_clears_the_store() -> None:
    store = MemoryStore()
    engine = fill(store)
    assert store.kept
    engine.clear_cache()
    settle(engine)
    run(engine, first())
    assert engine.stats.disk_hit_tokens == 0


def test_nothing_is_found_after_the_cache_is_cleared_while_orders_wait() -> None:
    store = MemoryStore(fill_kept())
    engine = stored_engine(small(), store)
    store.is_held = True
    # Prefixes on their way to the store.
    run(engine, request([50] * 40, max_new_tokens=2))
    run(engine, request([40] * 44, max_new_tokens=2))
    assert engine.load().host_blocks_used > 0
    engine.clear_cache()
    hits = engine.stats.prefix_hit_tokens
    run(engine, request([50] * 40, max_new_tokens=2))
    # It does not wait for what the store will forget.
    run(engine, first())
    assert engine.stats.prefix_hit_tokens == hits
    engine.check_integrity()
    store.is_held = False
    settle(engine)


def test_blocks_that_were_lent_can_be_claimed_when_the_store_is_done() -> None:
    store = MemoryStore()
    engine = stored_engine(small(), store)
    run(engine, first())
    run(engine, request([40] * 44, max_new_tokens=2))
    assert not engine.has_work
    blocks = range(40)
    engine.caller_blocks.claim((), host_blocks=blocks)
    assert engine.caller_blocks.host == frozenset(blocks)


def test_a_stop_after_new_weights_writes_nothing() -> None:
    store = MemoryStore()
    engine = stored_engine(small(), store)
    engine.weights_changed()
    run(engine, first())
    assert engine.save_prefixes() == 0
    assert not store.kept


def test_a_stop_writes_what_the_pools_keep() -> None:
    store = MemoryStore()
    engine = stored_engine(small(), store)
    run(engine, first())
    assert not store.kept
    assert engine.save_prefixes() == len(HEAD) // 4
    again = stored_engine(small(), MemoryStore(store.kept))
    assert ids(run(again, first())) == ids(run(make_engine(ROOMY)[0], first()))
    assert again.stats.disk_hit_tokens == len(HEAD)


def test_a_stop_passes_more_than_the_host_pool_holds() -> None:
    store = MemoryStore()
    engine = stored_engine(small(num_host_blocks=3), store)
    run(engine, first())
    assert engine.save_prefixes() == len(HEAD) // 4
    assert len(store.kept) == len(HEAD) // 4


def test_a_stop_without_time_writes_nothing() -> None:
    store = MemoryStore()
    engine = stored_engine(small(kv_disk_stop_seconds=0.0), store)
    run(engine, first())
    assert engine.save_prefixes() == 0


def test_a_slow_store_gets_no_more_than_the_queue_holds() -> None:
    store = MemoryStore()
    store.is_held = True
    engine = stored_engine(small(kv_disk_queue=2), store)
    for number in range(4):
        run(engine, request([number] * 44, max_new_tokens=2))
    assert engine.stats.disk_dropped_blocks > 0
    assert engine.load().host_blocks_used == 2
    engine.check_integrity()
    store.is_held = False
    settle(engine)


def test_a_host_pool_without_room_takes_the_first_blocks() -> None:
    store = MemoryStore(fill_kept())
    engine = stored_engine(small(num_host_blocks=4), store)
    assert ids(run(engine, first())) == ids(run(make_engine(ROOMY)[0], first()))
    assert engine.stats.disk_hit_tokens == 4 * 4
    settle(engine)


def test_a_broken_answer_is_forgotten_in_the_store() -> None:
    class Broken(FakeRunner):
        def execute(self, output: SchedulerOutput) -> RunnerOutput:
            result = super().execute(output)
            failed = {one.seq_id for entry in output.scheduled for one in entry.sample if 7 in one.token_ids}
            return dataclasses.replace(result, failed=frozenset(failed))

    config, store, head = small(max_running_sequences=4), MemoryStore(), [*range(20, 44)]
    engine = stored_engine(config, store, Broken(config))
    run(engine, request([*head, 1], max_new_tokens=2))
    run(engine, request([45] * 44, max_new_tokens=2))
    settle(engine)
    assert store.kept
    run(engine, request([*head, 7], max_new_tokens=2))
    settle(engine)
    hits = engine.stats.prefix_hit_tokens
    run(engine, request([*head, 1], max_new_tokens=2))
    assert engine.stats.prefix_hit_tokens == hits, "a prefix that cannot be trusted was found"


def test_what_is_forgotten_while_it_is_read_is_computed() -> None:
    store = MemoryStore(fill_kept())
    engine = stored_engine(small(), store)
    hashes = chain(engine)
    store.is_held = True
    engine.add(first())
    engine.step()
    assert engine._scheduler.disk is not None
    engine._scheduler.disk.forget(hashes[2:])
    store.is_held = False
    run(engine)
    assert engine.stats.disk_hit_tokens == engine.stats.prefix_hit_tokens == 0
    settle(engine)


def test_groups_of_layers_come_back_in_bundles() -> None:
    groups = (CacheGroup(num_blocks=2), CacheGroup(window=8))
    config = small(num_blocks=36, num_host_blocks=120, groups=groups)
    store = MemoryStore()
    engine = stored_engine(config, store)
    run(engine, first())
    engine.save_prefixes()
    again = stored_engine(config, MemoryStore(store.kept))
    answers = run(again, first())
    assert ids(answers) == ids(run(make_engine(engine_config(num_blocks=400, groups=groups))[0], first()))
    assert again.stats.disk_hit_tokens == again.stats.prefix_hit_tokens == len(HEAD)
    settle(again)


# Prompts of whole blocks of few kinds, so that many begin alike.
PROMPTS = st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=8).map(
    lambda kinds: [4 * kind + place % 4 for kind in kinds for place in range(4)]
)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), PROMPTS),
    st.tuples(st.sampled_from(["step", "step", "hold", "go on", "abort", "weights", "clear", "restart"]), st.just([1])),
)


@settings(deadline=None)
@given(
    actions=st.lists(ACTIONS, min_size=5, max_size=50),
    host=st.sampled_from(HOSTS),
    queue=st.sampled_from([1, 3, 256]),
    groups=st.sampled_from([(), (CacheGroup(num_blocks=2), CacheGroup(window=8))]),
)
def test_ids_are_those_of_an_idle_engine_whatever_the_store_does(
    actions: list[tuple[str, list[int]]], host: Any, queue: int, groups: tuple[CacheGroup, ...]
) -> None:
    width = 3 if groups else 1
    blocks, way, _ = host
    config = small(
        num_blocks=14 * width,
        **host_fields(max(blocks, 4) * width, way),
        kv_disk_queue=queue,
        groups=groups,
        reserve_share=0.0,
    )
    kept: dict[bytes, Any] = {}
    store = MemoryStore(kept)
    engine, answers, items = stored_engine(config, store), dict[str, Answer](), list[Request]()

    def step() -> None:
        collect(answers, engine.step())
        engine.check_integrity()

    for action, prompt in actions:
        match action:
            case "add":
                items.append(request([*prompt, 30], max_new_tokens=6))
                engine.add(items[-1])
            case "hold" | "go on":
                store.is_held = action == "hold"
            case "abort" if items:
                engine.abort(items.pop().request_id)
            case "weights":
                engine.weights_changed()
            case "clear":
                engine.clear_cache()
            case "restart":
                store.is_held = False
                run(engine, answers=answers)
                engine.save_prefixes()
                store = MemoryStore(kept)
                engine = stored_engine(config, store)
        step()
    store.is_held = False
    run(engine, answers=answers)
    engine.check_integrity()
    wanted = {
        tuple(item.prompt_token_ids): run(make_engine(ROOMY)[0], dataclasses.replace(item))[item.request_id].ids
        for item in items
    }
    for item in items:
        assert answers[item.request_id].ids == wanted[tuple(item.prompt_token_ids)]
    assert engine.load().kv_blocks_used == 0


def test_a_store_needs_a_host_pool() -> None:
    with pytest.raises(ValueError, match="num_host_blocks"):
        stored_engine(engine_config(), MemoryStore())
