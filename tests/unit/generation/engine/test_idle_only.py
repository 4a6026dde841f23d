"""Requests that use idle capacity only: they rest beside any other request, give way, and are nobody's wait."""

from __future__ import annotations

import pytest
from factories.engine.fake_engine import (
    Answer,
    FakeRunner,
    collect,
    engine_config,
    make_engine,
    request,
    run,
)
from penstock.common.idle_only import IDLE_TENANT
from penstock.common.pace import Demand, Pace
from penstock.generation.core.request import Request
from penstock.generation.core.step import RunnerOutput, SchedulerOutput
from penstock.generation.engine.engine import Engine


def idle(prompt: list[int], **facts: object) -> Request:
    return request(prompt, fair_share_key=IDLE_TENANT, **facts)


def tokens_of(runner: FakeRunner) -> list[set[int]]:
    """Per step: first prompt tokens of the sequences in it."""
    return [{entry.sequence.token_ids[0] for entry in step.scheduled} for step in runner.steps]


def test_they_rest_in_every_step_of_another_request_and_go_on_afterwards() -> None:
    engine, runner = make_engine(engine_config())
    answers: dict[str, Answer] = {}
    engine.add(idle([1], max_new_tokens=8))
    collect(answers, engine.step())
    run(engine, request([2], max_new_tokens=4), answers=answers)
    assert tokens_of(runner)[:5] == [{1}, {2}, {2}, {2}, {2}]
    assert all(step == {1} for step in tokens_of(runner)[5:])
    assert sorted(len(answer.ids[0]) for answer in answers.values()) == [4, 8]


def test_they_do_not_start_while_another_request_is_there() -> None:
    engine, runner = make_engine(engine_config())
    run(engine, idle([1], max_new_tokens=1), request([2], max_new_tokens=3))
    assert tokens_of(runner) == [{2}, {2}, {2}, {1}]


def test_all_of_them_give_their_blocks_to_a_request_that_needs_them() -> None:
    engine, runner = make_engine(engine_config(num_blocks=10, reserve_share=0.0))
    answers: dict[str, Answer] = {}
    engine.add(idle([1] * 24, max_new_tokens=8))
    collect(answers, engine.step())
    run(engine, request([2] * 30, max_new_tokens=4), answers=answers)
    assert tokens_of(runner)[1] == {2}
    assert engine.stats.preemptions == 1
    assert sorted(len(answer.ids[0]) for answer in answers.values()) == [4, 8]


def test_they_give_their_places_among_the_running_sequences() -> None:
    engine, runner = make_engine(engine_config(max_running_sequences=2, idle_share=1.0))
    answers: dict[str, Answer] = {}
    for token in (1, 2):
        engine.add(idle([token], max_new_tokens=6))
    collect(answers, engine.step())
    run(engine, request([3], max_new_tokens=2), request([4], max_new_tokens=2), answers=answers)
    assert {3, 4} in tokens_of(runner)[:4]
    assert tokens_of(runner)[1] <= {3, 4}
    assert sorted(len(answer.ids[0]) for answer in answers.values()) == [2, 2, 6, 6]


def test_their_own_steps_are_small_so_that_a_new_request_waits_for_little() -> None:
    engine, runner = make_engine(engine_config(max_batch_tokens=32, max_running_sequences=8, idle_share=0.25))
    run(engine, *(idle([token] * 20, max_new_tokens=2) for token in range(1, 7)))
    assert max(step.num_tokens for step in runner.steps) == 8
    assert max(len(step.scheduled) for step in runner.steps) == 2


def test_the_only_other_tenant_keeps_all_places_and_whole_steps() -> None:
    config = engine_config(max_batch_tokens=32, max_running_sequences=4, tenant_share=0.5)
    engine, runner = make_engine(config)
    run(engine, idle([9], max_new_tokens=1), *(request([token], max_new_tokens=2) for token in range(1, 5)))
    assert tokens_of(runner)[0] == {1, 2, 3, 4}


def test_no_forecast_counts_them_or_learns_from_them() -> None:
    engine, _ = make_engine(engine_config())
    for token in range(1, 20):
        engine.add(idle([token], max_new_tokens=8))
    engine.step()
    pace = engine.load().pace
    assert not pace.is_busy
    assert not pace.waiting
    assert pace.step_seconds == 0.0


def test_a_forecast_does_not_wait_for_those_on_their_way() -> None:
    pace = replace_pace(tokens_per_second=10.0)
    demand = Demand("one", 10, 10)
    assert pace.wait_seconds(demand, {IDLE_TENANT: 1000.0}) == 0.0
    assert pace.wait_seconds(demand, {IDLE_TENANT: 1000.0, "other": 5.0}) == pace.wait_seconds(demand, {"other": 5.0})


def replace_pace(**figures: float) -> Pace:
    return Pace()._replace(**figures)


def test_the_load_tells_how_many_there_are_waiting_or_running() -> None:
    engine, _ = make_engine(engine_config(max_running_sequences=1, idle_share=1.0))
    answers: dict[str, Answer] = {}
    engine.add(idle([1], max_new_tokens=4))
    engine.add(idle([2], max_new_tokens=4))
    collect(answers, engine.step())
    engine.add(request([3], max_new_tokens=1))
    load = engine.load()
    assert (load.waiting_requests + load.running_requests, load.idle_only_requests) == (3, 2)
    run(engine, answers=answers)
    assert engine.load().idle_only_requests == 0


class Clock:
    """A clock that steps set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowRunner(FakeRunner):
    """Runner with steps of two seconds."""

    clock: Clock

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.clock.now += 2.0
        return super().execute(output)


def slow_engine(**config: float) -> tuple[Engine, Clock]:
    settings = engine_config(tenant_memory_seconds=50.0, **config)
    runner, clock = SlowRunner(settings), Clock()
    runner.clock = clock
    return Engine(settings, runner, None, clock=clock), clock


def test_while_no_other_request_was_there_they_do_not_rest() -> None:
    engine, _ = slow_engine()
    engine.add(idle([1]))
    engine.step()
    assert engine.rest_seconds() == 0.0


@pytest.mark.parametrize(("share", "rest"), [(0.25, 6.0), (0.5, 2.0), (1.0, 0.0)])
def test_after_others_their_steps_take_a_share_of_the_time(share: float, rest: float) -> None:
    engine, clock = slow_engine(idle_share=share)
    run(engine, request([2], max_new_tokens=1, arrival_time=clock.now))
    engine.add(idle([1]))
    for _ in range(2):
        assert engine.rest_seconds() == 0.0
        engine.step()
        assert engine.rest_seconds() == rest
        clock.now += rest
    # Nobody came for --tenant-memory-seconds.
    clock.now += 50.0
    engine.step()
    assert engine.rest_seconds() == 0.0


def test_another_request_ends_their_rest() -> None:
    engine, clock = slow_engine()
    run(engine, request([2], max_new_tokens=1, arrival_time=clock.now))
    engine.add(idle([1]))
    engine.step()
    assert engine.rest_seconds() == 6.0
    engine.add(request([3], max_new_tokens=2, arrival_time=clock.now))
    assert engine.rest_seconds() == 0.0


def test_a_rest_is_not_counted_as_the_time_of_a_step() -> None:
    engine, clock = slow_engine()
    run(engine, request([2], max_new_tokens=1, arrival_time=clock.now))
    engine.add(idle([1]))
    engine.step()
    clock.now += 6.0
    engine.add(request([3], max_new_tokens=3, arrival_time=clock.now))
    for _ in range(3):
        engine.step()
    assert engine.load().pace.least_step_seconds == 2.0
    assert engine.load().pace.step_seconds == 2.0
