"""Blocks behind a window: what a sequence holds, what a prefix hit needs, and what a failure takes out of the cache."""

from __future__ import annotations

import pytest
from factories.engine.fake_engine import Answer, collect, engine_config, make_engine, request, run
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.engine import Engine

PROMPT = list(range(10, 45))


def config(**changes: int) -> EngineConfig:
    fields = {"block_size": 4, "num_blocks": 12, "window": 9, "max_batch_tokens": 8, "max_running_sequences": 4}
    return engine_config(**{**fields, **changes})


def hits(engine: Engine, prompt: list[int]) -> int:
    """Prompt tokens that were found cached, or need not be."""
    before = engine.stats.prefix_hit_tokens
    run(engine, request(prompt, max_new_tokens=2))
    engine.check_integrity()
    return engine.stats.prefix_hit_tokens - before


def test_a_sequence_holds_its_window_and_the_rows_of_a_step() -> None:
    engine, _ = make_engine(config(num_blocks=5))
    assert engine.config.block_groups[0].most_blocks(engine.config.max_batch_tokens, engine.config.block_size) == 5
    item = request(PROMPT, max_new_tokens=30)
    engine.check(item)
    engine.add(item)
    dumped: list[int] = []
    answers: dict[str, Answer] = {}
    while engine.has_work:
        collect(answers, engine.step())
        dumped += [one.blocks for group in engine.dump().running for one in group.sequences]
    assert max(dumped) <= 5
    # Between two steps: the window and a token more.
    assert set(dumped[-20:]) == {3}
    assert engine.stats.preemptions == 0


def test_a_prefix_hit_needs_the_blocks_of_the_last_window_only() -> None:
    engine, _ = make_engine(config(num_blocks=20))
    assert hits(engine, PROMPT) == 0
    pool = engine._scheduler.pool
    hashes = _hashes(engine, PROMPT)
    for block_hash in hashes[:5]:
        pool.discard(block_hash)
    assert hits(engine, PROMPT) == 32
    # Two blocks are read behind token 32: without one of them nothing is left of this prompt but its beginning.
    pool.discard(hashes[7])
    assert hits(engine, PROMPT) == 28
    pool.discard(hashes[6])
    assert hits(engine, [*PROMPT[:28], 1]) == 0


def test_a_failed_sequence_takes_released_blocks_out_of_the_cache() -> None:
    engine, _ = make_engine(config(num_blocks=20))
    engine.add(request(PROMPT, max_new_tokens=9))
    while not any(
        one.sequences[0].tables and one.sequences[0].tables[0].num_released for one in engine._groups.values()
    ):
        engine.step()
    groups = list(engine._groups.values())
    pool = engine._scheduler.pool
    assert any(pool.hash_of(block) for block in range(20))
    engine._scheduler.disown(groups[0])
    assert not any(pool.hash_of(block) for block in range(20))
    engine.check_integrity()


def test_bounds_are_named() -> None:
    with pytest.raises(ValueError, match="window must not be negative"):
        config(window=-1)
    with pytest.raises(ValueError, match="keeps_states allows no window"):
        engine_config(keeps_states=True, num_state_snapshots=1, window=3)


def _hashes(engine: Engine, prompt: list[int]) -> list[bytes]:
    """Hashes of a prompt's whole blocks."""
    engine.add(item := request(prompt, max_new_tokens=1))
    group = engine._groups[item.request_id]
    engine._scheduler.tables.hash_blocks(group.sequences[0], group.block_salt)
    found = list(group.sequences[0].block_hashes)
    run(engine)
    return found
