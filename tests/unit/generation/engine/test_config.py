"""Bounds of the engine: requests that are refused, and that the two sides of the pool's arithmetic agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
from factories.engine.fake_engine import engine_config
from hypothesis import given
from hypothesis import strategies as st
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.engine.acceptance import most_output_tokens
from penstock.generation.engine.decoding.mode_registry import MODES
from penstock.generation.engine.end_times import DeadlineQueue


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"max_context_tokens": 1}, "max_context_tokens"),
        ({"max_batch_tokens": 8, "max_running_sequences": 9}, "max_batch_tokens"),
        ({"max_queued_requests": 0}, "max_queued_requests"),
        ({"reserve_share": 1.0}, "reserve_share"),
        ({"long_prompt_share": 0.0}, "long_prompt_share"),
        ({"priority_seconds": 0.0}, "priority_seconds"),
        ({"max_priority": -1}, "max_priority"),
    ],
)
def test_a_bound_that_cannot_work_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        engine_config(**changes)


@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 60), st.integers(1, 5))
def test_the_longest_output_is_the_longest_whose_blocks_fit(blocks: int, size: int, prompt: int, n: int) -> None:
    config = engine_config(num_blocks=blocks, block_size=size, max_context_tokens=10_000)
    params = SamplingParams(1, num_return_sequences=n)
    longest = most_output_tokens(config, MODES, params, prompt)
    if longest >= 1:
        assert MODES.blocks_needed(config, params, prompt, longest) <= blocks
    assert MODES.blocks_needed(config, params, prompt, longest + 1) > blocks


def test_the_context_bounds_the_output_too() -> None:
    config = engine_config(num_blocks=1000, max_context_tokens=50)
    assert most_output_tokens(config, MODES, SamplingParams(1), 20) == 30


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.booleans()), max_size=40))
def test_time_limits_are_due_once_earliest_first_and_only_while_set(events: list[tuple[int, int, bool]]) -> None:
    limits: DeadlineQueue[int] = DeadlineQueue()
    expected: dict[int, float] = {}
    for now, (time, key, keep) in enumerate(events):
        if keep:
            limits.set(key, time)
            expected[key] = time
        else:
            limits.discard(key)
            expected.pop(key, None)
        due = limits.due(now)
        assert sorted(due) == sorted(key for key, limit in expected.items() if limit < now)
        assert [expected[key] for key in due] == sorted(expected[key] for key in due)
        for key in due:
            del expected[key]
    assert sorted(limits.due(math.inf)) == sorted(expected)
    assert len(limits) == 0
