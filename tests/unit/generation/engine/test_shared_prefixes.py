"""Prompts that begin alike and come together: their common part is computed once, and no ids change by it."""

from __future__ import annotations

from typing import Any

import pytest
from factories.engine.fake_engine import Answer, FakeRunner, collect, engine_config, make_engine, request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.core.request import Request
from penstock.generation.core.step import RunnerOutput, SchedulerOutput
from penstock.generation.engine.config import EngineConfig

COMMON = list(range(10, 26))


def rows(runner: FakeRunner) -> list[int]:
    return [step.num_tokens for step in runner.steps]


def crowd(size: int, head: list[int], **fields: Any) -> list[Request]:
    """Requests for one token with equal heads and two tokens of their own."""
    return [request([*head, number, number], **({"max_new_tokens": 1} | fields)) for number in range(size)]


def test_a_common_beginning_is_computed_once_in_the_step_that_all_arrive_in() -> None:
    engine, runner = make_engine()
    items = crowd(4, COMMON)
    answers = run(engine, *items)
    assert rows(runner) == [len(COMMON) + 4 * 2]
    cached = [answers[item.request_id].finished.cached_tokens for item in items]  # type: ignore[union-attr]
    assert cached == [0] + [len(COMMON)] * 3
    assert engine.stats.prefix_hit_tokens == 3 * len(COMMON)


def test_whole_prompts_that_are_equal_differ_by_their_last_block() -> None:
    engine, runner = make_engine()
    run(engine, *(request(COMMON, max_new_tokens=2) for _ in range(3)))
    assert rows(runner) == [16 + 4 + 4, 3]


def test_who_shares_waits_for_the_rest_of_a_beginning_that_takes_several_steps() -> None:
    engine, runner = make_engine(engine_config(max_batch_tokens=16))
    run(engine, *crowd(3, list(range(40))))
    # The whole budget goes to the first, though others wait: they have no use for it.
    assert rows(runner) == [16, 16, 8 + 3 * 2]


def test_a_chunk_that_ends_inside_a_block_is_gone_on_with_by_its_owner_only() -> None:
    engine, runner = make_engine(engine_config(max_batch_tokens=18))
    run(engine, *crowd(2, list(range(40))))
    assert rows(runner) == [18, 18, 4 + 2 * 2]


def test_who_waits_for_a_beginning_is_passed_by_those_with_another_prompt() -> None:
    engine, runner = make_engine(engine_config(max_batch_tokens=16))
    first, second = crowd(2, list(range(40)))
    run(engine, first, second, request([7, 7, 7], max_new_tokens=1))
    assert [entry.sequence.token_ids[0] for entry in runner.steps[0].scheduled] == [0, 7]
    assert sum(rows(runner)) == 40 + 2 * 2 + 3


def test_those_who_wait_keep_their_places_among_the_running() -> None:
    engine, runner = make_engine(engine_config(max_batch_tokens=16, max_running_sequences=2))
    first, second = crowd(2, list(range(40)))
    run(engine, first, second, request([7, 7, 7], max_new_tokens=1))
    assert all(entry.sequence.token_ids[0] != 7 for step in runner.steps[:3] for entry in step.scheduled)


def test_a_more_urgent_request_does_not_wait_for_a_less_urgent_one() -> None:
    engine, runner = make_engine(engine_config(max_batch_tokens=16))
    slow, urgent = crowd(2, list(range(40)))
    urgent.priority = 1
    engine.add(slow)
    answers: dict[str, Answer] = {}
    collect(answers, engine.step())
    run(engine, urgent, answers=answers)
    # It starts from what is computed and goes on by itself: 4 rows beside 12 of the other one, the same 4 among them.
    # Then the other one takes over from it.
    assert rows(runner) == [16, 16, 40 - 16 - 12 + 2 * 2]


def test_salts_do_not_share_within_a_step_either() -> None:
    engine, runner = make_engine()
    run(engine, *crowd(2, COMMON, cache_salt="a"), *crowd(2, COMMON, cache_salt="b"))
    assert rows(runner) == [2 * len(COMMON) + 4 * 2]


def test_without_the_prefix_cache_nothing_is_shared() -> None:
    engine, runner = make_engine(engine_config(prefix_cache=False))
    run(engine, *crowd(2, COMMON))
    assert rows(runner) == [2 * (len(COMMON) + 2)]


def test_who_wants_every_row_computes_them_and_others_share_them() -> None:
    engine, runner = make_engine()
    plain, wants = crowd(1, COMMON) + crowd(1, COMMON, prompt_logprobs=0)
    more = crowd(1, COMMON)[0]
    answers = run(engine, plain, wants, more)
    assert [entry.num_tokens for entry in runner.steps[0].scheduled] == [18, 18, 2]
    started = answers[wants.request_id].started
    assert started is not None
    assert len(started.prompt_logprobs) == 18


def test_cancelling_the_one_that_computes_takes_nothing_from_those_who_share() -> None:
    def items() -> list[Request]:
        return crowd(3, list(range(40)), max_new_tokens=5)

    expected = [run(make_engine()[0], item)[item.request_id].ids for item in items()]
    for moment in range(6):
        engine, _ = make_engine(engine_config(max_batch_tokens=16))
        submitted = items()
        answers: dict[str, Answer] = {}
        for item in submitted:
            engine.add(item)
        for _ in range(moment):
            collect(answers, engine.step())
        engine.abort(submitted[0].request_id)
        run(engine, answers=answers)
        assert [answers[item.request_id].ids for item in submitted[1:]] == expected[1:]
        assert engine.load().kv_blocks_used == 0


class SickRunner:
    """Runner that gives no numbers for sequences that end in `sick`."""

    def __init__(self, runner: FakeRunner, sick: int) -> None:
        self._runner, self._sick = runner, sick

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        result = self._runner.execute(output)
        bad = {one.seq_id for entry in output.scheduled for one in entry.sample if one.token_ids[-1] == self._sick}
        sampled = {seq_id: token for seq_id, token in result.sampled.items() if seq_id not in bad}
        return RunnerOutput(sampled, result.prompt_logprobs, frozenset(bad))

    def release(self, seq_ids: Any) -> None:
        self._runner.release(seq_ids)


def test_a_failure_of_the_one_that_computes_is_its_own() -> None:
    engine, runner = make_engine()
    engine._runner = SickRunner(runner, sick=0)
    items = crowd(3, COMMON, max_new_tokens=3)
    answers = run(engine, *items)
    error = answers[items[0].request_id].finished.error  # type: ignore[union-attr]
    assert error is not None
    assert error.reason == "MODEL_OUTPUT_NAN"
    assert [len(answers[item.request_id].ids[0]) for item in items[1:]] == [3, 3]


def test_blocks_of_a_request_without_numbers_leave_the_prefix_cache() -> None:
    engine, runner = make_engine()
    engine._runner = sick = SickRunner(runner, sick=0)
    prompt = [*COMMON, 0]
    run(engine, bad := request(prompt, max_new_tokens=3))
    assert engine.load().kv_blocks_evictable == 0, "nobody shall read what it left"
    sick._sick = -1
    answers = run(engine, again := request(prompt, max_new_tokens=3))
    assert bad.request_id not in answers
    assert answers[again.request_id].started.cached_tokens == 0  # type: ignore[union-attr]


def test_blocks_that_a_healthy_request_holds_stay_its_own() -> None:
    engine, runner = make_engine()
    engine._runner = SickRunner(runner, sick=0)
    healthy, bad = request([*COMMON, 1], max_new_tokens=6), request([*COMMON, 0], max_new_tokens=6)
    answers = run(engine, healthy, bad)
    assert len(answers[healthy.request_id].ids[0]) == 6
    assert engine.load().kv_blocks_used == 0


def test_what_a_long_prompt_leaves_of_its_share_goes_back_to_it() -> None:
    engine, runner = make_engine(engine_config(max_batch_tokens=16, max_running_sequences=1))
    run(engine, request([1] * 40, max_new_tokens=1), request([2] * 4, max_new_tokens=1))
    assert rows(runner) == [16, 16, 8, 4]


@pytest.mark.parametrize("width", [2, 3])
def test_siblings_that_compute_their_outputs_again_after_a_preemption_share_safely(width: int) -> None:
    config = engine_config(num_blocks=24, block_size=2, max_running_sequences=8, max_batch_tokens=24, reserve_share=0.0)
    wide = {"max_new_tokens": 12, "num_return_sequences": width, "do_sample": True, "seed": 5}
    expected = run(make_engine()[0], item := request([2] * 10, **wide))[item.request_id].ids
    engine, _ = make_engine(config)
    late = request([2] * 10, arrival_time=1.0, **wide)
    answers = run(engine, request([1] * 6, max_new_tokens=20), late)
    assert answers[late.request_id].ids == expected
    assert engine.stats.preemptions > 0


def most_rows(items: list[Request], block_size: int) -> int:
    """Most rows to compute: each different full block once, and of every prompt the tokens after, at least one."""
    blocks: set[tuple[str, tuple[int, ...]]] = set()
    rest = 0
    for item in items:
        ids = item.prompt_token_ids
        full = (len(ids) - 1) // block_size * block_size
        blocks.update((item.cache_salt, tuple(ids[:end])) for end in range(block_size, full + 1, block_size))
        rest += len(ids) - full
    return len(blocks) * block_size + rest


prompts = st.lists(
    st.tuples(
        st.sampled_from([[], COMMON, COMMON[:9], [1] * 30, [1] * 17 + [2] * 17]),
        st.lists(st.integers(0, 1), min_size=1, max_size=8),
        st.sampled_from(["", "", "", "tenant"]),
    ),
    min_size=1,
    max_size=9,
)
budgets = st.builds(
    engine_config,
    num_blocks=st.just(300),
    block_size=st.integers(1, 6),
    max_running_sequences=st.just(9),
    max_batch_tokens=st.integers(9, 60),
    long_prompt_share=st.sampled_from([0.3, 0.75, 1.0]),
)


@settings(max_examples=40, deadline=None)
@given(prompts, budgets)
def test_nothing_is_computed_twice_however_the_prompts_are_cut(
    drawn: list[tuple[list[int], list[int], str]], config: EngineConfig
) -> None:
    engine, runner = make_engine(config)
    items = [
        request(head + tail, max_new_tokens=1, cache_salt=salt, arrival_time=float(number))
        for number, (head, tail, salt) in enumerate(drawn)
    ]
    run(engine, *items)
    assert sum(rows(runner)) <= most_rows(items, config.block_size)


def test_within_a_step_tenants_share_nothing_that_another_may_have_to_give_up() -> None:
    """A crowd's last request gives way though later ones of other tenants are in the step.

    Found by trying many: a request of "b" would take over blocks that one of "a" was to fill in the same step, and that
    one is taken out of it. Both callers have one cache_salt, which callers of a router never have.
    """
    prompt = [*range(1, 17)]
    sizes = {"num_blocks": 13, "max_batch_tokens": 40, "max_running_sequences": 8}
    engine, _ = make_engine(engine_config(**sizes, reserve_share=0.0, tenant_slowdown=0.0))
    answers: dict[str, Answer] = {}
    for tenant, length, most in (("a", 21, 3), ("b", 17, 11), ("a", 12, 5)):
        engine.add(request([length] * length, max_new_tokens=most, fair_share_key=tenant))
    collect(answers, engine.step())
    for number, (tenant, most) in enumerate((("b", 5), ("a", 6), ("a", 3))):
        engine.add(request([*prompt, 24 + number], max_new_tokens=most, fair_share_key=tenant))
    run(engine, answers=answers)
    assert engine.stats.preemptions
