"""Snapshots of states: where they are taken, how long they live, and how far a prefix is shared."""

from __future__ import annotations

import pytest
from factories.engine.fake_engine import engine_config, make_engine, request, run
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.engine import Engine

PROMPT = list(range(10, 29))


def config(**changes: int) -> EngineConfig:
    fields = {"block_size": 4, "num_blocks": 100, "num_state_snapshots": 8, **changes}
    return engine_config(keeps_states=True, **fields)


def saved(runner: object) -> list[int]:
    """Tokens after which snapshots were taken, in order."""
    return [copy.num_tokens for step in runner.steps for copy in step.saved]  # type: ignore[attr-defined]


def hits(engine: Engine, prompt: list[int]) -> int:
    """Prompt tokens that were found cached."""
    before = engine.stats.prefix_hit_tokens
    run(engine, request(prompt, max_new_tokens=2))
    return engine.stats.prefix_hit_tokens - before


def test_a_prompt_leaves_one_after_its_last_whole_block_and_chunks_leave_theirs() -> None:
    engine, runner = make_engine(config())
    run(engine, request(PROMPT, max_new_tokens=9))
    # Not after blocks that answers fill.
    assert saved(runner) == [16]
    engine, runner = make_engine(config(max_batch_tokens=10, max_running_sequences=4))
    run(engine, request(PROMPT, max_new_tokens=9))
    assert saved(runner) == [8, 16]
    # A prompt of whole blocks keeps its last token, which must be computed.
    assert [hits(engine, PROMPT[:count]) for count in (16, 17, 12, 19)] == [8, 16, 8, 16]


def test_a_short_beginning_has_none_and_costs_no_further_pass() -> None:
    engine, runner = make_engine(config(state_snapshot_tokens=16))
    run(engine, request(PROMPT[:15], max_new_tokens=3))
    # Whole blocks, after which one would cost nothing, and be of no use.
    run(engine, request(range(60, 72), max_new_tokens=1))
    assert [[entry.num_tokens for entry in step.scheduled] for step in runner.steps] == [[15], [1], [1], [12]]
    assert not saved(runner)
    run(engine, request(PROMPT, max_new_tokens=3))
    assert saved(runner) == [16]
    assert [hits(engine, PROMPT[:count]) for count in (15, 18)] == [0, 16]
    # Nor has a prompt that goes on a little behind another's.
    before = len(runner.steps)
    assert hits(engine, [*PROMPT[:16], *range(40, 50)]) == 16
    assert [entry.num_tokens for step in runner.steps[before:] for entry in step.scheduled] == [10, 1]
    # The last part ends with a block, too, a little behind one that has a snapshot.
    assert hits(engine, [*PROMPT[:16], *range(40, 60)]) == 16
    assert saved(runner) == [16, 32]
    # Chunks that end before it are as long as they can be.
    engine, runner = make_engine(config(state_snapshot_tokens=16, max_batch_tokens=10, max_running_sequences=4))
    run(engine, request(PROMPT, max_new_tokens=2))
    assert [step.scheduled[0].num_tokens for step in runner.steps] == [10, 6, 3, 1]
    assert saved(runner) == [16]


def test_a_prefix_is_shared_up_to_a_block_with_a_snapshot() -> None:
    engine, _ = make_engine(config())
    assert hits(engine, PROMPT) == 0
    assert hits(engine, PROMPT[:13]) == 0
    assert hits(engine, [*PROMPT[:13], 1, 2, 3]) == 12
    assert hits(engine, PROMPT) == 16
    engine.clear_cache()
    assert hits(engine, PROMPT) == 0


def test_the_snapshot_that_was_used_the_longest_ago_gives_way() -> None:
    engine, _ = make_engine(config(num_state_snapshots=2))
    first, second, third = ([token] * 6 for token in (1, 2, 3))
    assert [hits(engine, prompt) for prompt in (first, second, first, third)] == [0, 0, 4, 0]
    assert [hits(engine, prompt) for prompt in (first, third, second)] == [4, 4, 0]


def test_a_snapshot_goes_with_its_block() -> None:
    engine, _ = make_engine(config(num_blocks=8, max_batch_tokens=40, max_running_sequences=4))
    hits(engine, [1] * 6)
    snapshots = engine._scheduler.snapshots
    assert snapshots is not None
    assert len(snapshots) == 1
    # Takes every block of the pool.
    hits(engine, list(range(10, 41)))
    assert len(snapshots) == 1
    assert hits(engine, [1] * 6) == 0


def test_a_step_that_failed_leaves_no_snapshot() -> None:
    engine, runner = make_engine(config(num_state_snapshots=1))
    runner.fail_at_step = 1
    with pytest.raises(RuntimeError, match="device lost"):
        run(engine, request(PROMPT))
    snapshots = engine._scheduler.snapshots
    assert snapshots is not None
    assert len(snapshots) == 0
    assert snapshots.saves(()) == ()
    assert snapshots._free == [0]


def test_bounds_are_named() -> None:
    with pytest.raises(ValueError, match="needs num_state_snapshots"):
        config(num_state_snapshots=0)
    with pytest.raises(ValueError, match="num_state_snapshots must not be negative"):
        config(num_state_snapshots=-1)
    with pytest.raises(ValueError, match="state_snapshot_tokens must be at least 0"):
        config(state_snapshot_tokens=-1)
    with pytest.raises(ValueError, match="keeps_states allows no num_host_blocks"):
        config(num_host_blocks=3)
