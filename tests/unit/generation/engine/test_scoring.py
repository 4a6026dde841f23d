"""Scoring and embedding in the engine: tokens that are computed or reused, and how they end."""

from __future__ import annotations

from typing import Any

import pytest
from factories.engine.fake_engine import engine_config, make_engine, request, run
from penstock.common.errors import DeadlineExceeded, ResourceExhausted
from penstock.generation.core.request import Purpose, Request
from penstock.generation.core.step import RunnerOutput, SampledToken, SchedulerOutput


def scoring(prompt: range, continuation: range, **fields: Any) -> Request:
    item = request([*prompt, *continuation], prompt_logprobs=0, **fields)
    item.purpose, item.first_needed_row = Purpose.SCORE, len(prompt) - 1
    return item


def embedding(prompt: range, **fields: Any) -> Request:
    item = request(prompt, **fields)
    item.purpose, item.first_needed_row = Purpose.EMBED, 0
    return item


def scored(answer: Any) -> list[int]:
    return [entry.chosen.token_id for entry in answer.started.prompt_logprobs]


def test_only_the_continuation_is_scored_and_its_last_token_is_never_computed() -> None:
    engine, runner = make_engine()
    item = scoring(range(1, 11), range(20, 25))
    answer = run(engine, item)[item.request_id]
    assert scored(answer) == [20, 21, 22, 23, 24]
    assert sum(step.num_tokens for step in runner.steps) == 14
    assert not answer.deltas
    assert answer.finished is not None
    assert answer.finished.error is None
    assert answer.finished.prompt_tokens == 15
    assert engine.load().kv_blocks_used == 0


def test_a_prompt_that_was_computed_before_is_reused_up_to_the_row_that_is_needed() -> None:
    engine, runner = make_engine()
    run(engine, scoring(range(1, 11), range(20, 25)))
    runner.steps.clear()
    item = scoring(range(1, 11), range(30, 32))
    answer = run(engine, item)[item.request_id]
    assert scored(answer) == [30, 31]
    # Row 9 is needed: two blocks of four are reused.
    assert [(entry.start, entry.num_tokens) for step in runner.steps for entry in step.scheduled] == [(8, 3)]


def test_long_items_are_chunked_and_lose_no_position() -> None:
    engine, _ = make_engine(engine_config(max_batch_tokens=16, max_running_sequences=4))
    items = [scoring(range(1, 40), range(50, 100)) for _ in range(3)]
    answers = run(engine, *items)
    assert all(scored(answers[item.request_id]) == list(range(50, 100)) for item in items)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: request(range(50, 130), max_new_tokens=2, prompt_logprobs=0),
        lambda: scoring(range(50, 90), range(90, 130)),
    ],
)
def test_what_was_scored_before_a_preemption_is_not_scored_again(make: Any, prefix_cache: bool) -> None:
    """Its prompt takes twenty steps, and after twelve the first request needs its blocks."""
    config = engine_config(num_blocks=26, max_batch_tokens=5, max_running_sequences=4, prefix_cache=prefix_cache)
    engine, runner = make_engine(config)
    computed: list[int] = []
    at_preemption = 0
    execute = runner.execute

    def counting(output: SchedulerOutput) -> RunnerOutput:
        nonlocal at_preemption
        if engine.stats.preemptions and not at_preemption:
            at_preemption = sum(computed)
        result = execute(output)
        computed.extend(len(found) for found in result.prompt_logprobs.values())
        return result

    runner.execute = counting  # type: ignore[method-assign]
    running, asking = request(range(1, 9), max_new_tokens=60, priority=1), make()
    answers = run(engine, running, asking)
    started = answers[asking.request_id].started
    assert started is not None
    expected = [*range(90, 130)] if asking.purpose is Purpose.SCORE else [None, *range(51, 130)]
    assert [entry.chosen and entry.chosen.token_id for entry in started.prompt_logprobs] == expected
    assert 0 < at_preemption < sum(computed)
    assert sum(computed) == len(expected) - (expected[0] is None)


def test_an_embedding_computes_every_row_even_of_a_cached_prompt() -> None:
    engine, runner = make_engine()
    execute = runner.execute

    def pooling(output: SchedulerOutput) -> RunnerOutput:
        result = execute(output)
        sampled = {seq_id: SampledToken(-1, embedding=b"mean") for seq_id in result.sampled}
        return RunnerOutput(sampled, result.prompt_logprobs)

    runner.execute = pooling  # type: ignore[method-assign]
    for _ in range(2):
        runner.steps.clear()
        item = embedding(range(1, 11))
        answer = run(engine, item)[item.request_id]
        assert sum(step.num_tokens for step in runner.steps) == 10
        assert answer.finished is not None
        assert answer.finished.embedding == b"mean"


@pytest.mark.parametrize("make", [lambda: scoring(range(1, 190), range(1, 13)), lambda: embedding(range(1, 201))])
def test_the_whole_context_may_be_used(make: Any) -> None:
    engine, _ = make_engine(engine_config(max_context_tokens=200))
    item = make()
    assert run(engine, item)[item.request_id].finished is not None


def test_what_an_empty_pool_cannot_hold_is_refused() -> None:
    engine, _ = make_engine(engine_config(num_blocks=8))
    run(engine, scoring(range(1, 33), range(5, 6)))
    with pytest.raises(ResourceExhausted):
        engine.check(scoring(range(1, 33), range(5, 7)))


def test_a_deadline_ends_an_item_with_its_error() -> None:
    now = 0.0
    engine, _ = make_engine(engine_config(max_batch_tokens=16), clock=lambda: now)
    item = scoring(range(1, 80), range(5, 9), deadline=1.0)
    engine.add(item)
    engine.step()
    now = 2.0
    (output,) = engine.step()
    assert output.finished is not None
    assert isinstance(output.finished.error, DeadlineExceeded)
    assert engine.load().kv_blocks_used == 0
