"""Load beyond capacity, in simulated time: refused early, no work for nothing, and one tenant's flood is its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from factories.engine.fake_engine import Answer, collect, engine_config, make_engine, request, run
from factories.engine.open_loop import Flow, Slowdown, TimedRunner, simulate
from penstock.common.errors import DeadlineExceeded
from penstock.common.pace import Demand, Pace
from penstock.generation.core.request import Purpose
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.fairness.fair_turns import FairTurns
from penstock.generation.engine.fairness.shares import TenantShares

SECONDS = 12.0


def goodput(flow: Flow) -> float:
    """Answers a second that come in time, after the first third: queues fill first."""
    (outcome,) = simulate([flow])
    return len(outcome.good) / SECONDS


@pytest.mark.parametrize("deadline", [0.6, 3.0])
def test_three_times_the_capacity_keeps_the_goodput_and_refuses_the_rest(deadline: float) -> None:
    # Capacity without deadlines is about 62 a second; 0.6 s is less than an answer takes when 64 run.
    peak = max(goodput(Flow(rate, deadline_seconds=deadline, end=SECONDS)) for rate in (50.0, 65.0))
    (outcome,) = simulate([Flow(190.0, deadline_seconds=deadline, end=SECONDS)])
    assert len(outcome.good) / SECONDS >= 0.9 * peak
    assert len(outcome.late) <= 0.02 * len(outcome.good)
    assert outcome.refused > len(outcome.good)
    assert min(outcome.pushbacks) >= 1.0


# About ten answers a second, and a deadline of twice the median of a hundred callers.
SHARED: dict[str, Any] = {"fixed": 0.03, "per_row": 0.001}
OVERLOAD = Flow(29.0, prompt_tokens=60, deadline_seconds=19.0, end=90.0)


@pytest.mark.parametrize("begin", [10.0, *(pytest.param(begin, marks=pytest.mark.slow) for begin in (0.0, 30.0))])
def test_a_machine_that_becomes_half_as_fast_now_and_then_loses_nothing_that_was_accepted(begin: float) -> None:
    """Another program takes half of the processor for 20 s of every 40: what waits must be in time even so."""
    slowdown = Slowdown(begin=begin)
    (outcome,) = simulate([OVERLOAD], slowdown=slowdown, **SHARED)
    (bounded,) = simulate([OVERLOAD], slowdown=slowdown, max_running_sequences=32, max_queued_requests=32, **SHARED)
    assert len(outcome.late) <= 0.01 * (len(outcome.good) + len(outcome.late))
    assert len(outcome.good) >= 0.9 * len(bounded.good)


def test_headroom_for_slow_times_costs_no_goodput_where_there_are_none() -> None:
    (outcome,) = simulate([OVERLOAD], **SHARED)
    (bounded,) = simulate([OVERLOAD], max_running_sequences=32, max_queued_requests=32, **SHARED)
    assert not outcome.late
    assert len(outcome.good) >= len(bounded.good)


def test_a_load_that_fits_is_not_refused() -> None:
    (outcome,) = simulate([Flow(40.0, deadline_seconds=1.0, end=SECONDS)])
    assert not outcome.refused
    assert not outcome.late


@pytest.mark.parametrize("ends", ["after", "within"])
def test_a_pause_teaches_no_forecast(ends: str) -> None:
    """Otherwise the first minutes after it would refuse requests that can be in time."""
    runner = TimedRunner(0.03, 0.001)
    config = engine_config(num_blocks=4096, block_size=16, max_batch_tokens=512, max_running_sequences=4)
    engine = Engine(config, runner, None, clock=lambda: runner.now)  # type: ignore[arg-type]

    def crowd(pause_seconds: float = 0.0) -> Pace:
        items = [request([number] * 40, max_new_tokens=8, arrival_time=runner.now) for number in range(24)]
        for item in items:
            engine.add(item)
        for _ in range(20):
            engine.step()
        if pause_seconds:
            engine.pause_began()
            runner.now += pause_seconds
            for item in items if ends == "within" else ():
                engine.abort(item.request_id)
            engine.end_overdue()
            engine.pause_ended()
        while engine.has_work:
            engine.step()
        return engine.load().pace

    crowd()
    before, after = crowd(), crowd(600.0)
    assert after.headroom_of(10.0, 1.0) <= before.headroom_of(10.0, 1.0)
    assert after.tokens_per_second == pytest.approx(before.tokens_per_second, rel=0.2)
    assert after.step_seconds == pytest.approx(before.step_seconds, rel=0.2)


def test_answers_shorter_than_allowed_are_learnt() -> None:
    """Requests that may have 1000 tokens and take 32 are judged by the 32."""
    pace = Pace(tokens_per_second=1000.0, step_seconds=0.02, least_step_seconds=0.01, full_step_seconds=0.02)
    demand = Demand("", 40, 1000)
    assert pace.output(demand) == 256
    learnt = Pace(output_shares=[0.032 if bucket == 10 else 0.0 for bucket in range(33)])
    assert learnt.output(demand) == pytest.approx(32)


def test_a_flood_leaves_another_tenants_p99_within_twice_of_its_solo() -> None:
    quiet = Flow(5.0, tenant="b", begin=1.0, end=SECONDS)
    (solo,) = simulate([quiet])
    # Beside a flood with deadlines, and one without any, which fills the queue.
    for deadline in (3.0, None):
        flood, beside = simulate([Flow(150.0, tenant="a", deadline_seconds=deadline, end=SECONDS), quiet])
        assert not beside.refused
        assert len(beside.good) == len(solo.good) or not beside.late
        assert beside.p99 <= 2 * solo.p99
        assert flood.good


def test_tenants_take_turns_by_tokens() -> None:
    """One with long prompts gets fewer requests through than one with short prompts, both waiting all the time."""
    engine, runner = make_engine(engine_config(max_running_sequences=1, tenant_slowdown=0.0))
    for number in range(12):
        for tenant, length in (("long", 30), ("short", 6)):
            prompt = [number + 1] * length
            engine.add(request(prompt, request_id=f"{tenant}{number}", max_new_tokens=2, fair_share_key=tenant))
    run(engine)
    first = dict.fromkeys(
        "long" if entry.sequence.num_prompt_tokens == 30 else "short"
        for step in runner.steps[:1]
        for entry in step.scheduled
    )
    assert list(first) == ["long"]
    order = [entry.sequence.seq_id for step in runner.steps for entry in step.scheduled if entry.num_prompt_rows]
    lengths = [
        entry.sequence.num_prompt_tokens for step in runner.steps for entry in step.scheduled if entry.num_prompt_rows
    ]
    assert len(order) == 24
    # 32 tokens of one are as many as 8 each of four others.
    assert lengths[:10].count(6) == 8


def test_one_tenants_order_is_that_of_arrival_and_priority() -> None:
    engine, runner = make_engine(engine_config(max_running_sequences=1))
    for number, priority in enumerate((0, 0, 1, 0)):
        engine.add(request([number + 1] * 4, arrival_time=float(number), priority=priority, max_new_tokens=1))
    run(engine)
    firsts = [entry.sequence.token_ids[0] for step in runner.steps for entry in step.scheduled]
    assert firsts == [3, 1, 2, 4]


def test_a_tenant_has_its_share_of_running_sequences_while_there_are_others() -> None:
    engine, _ = make_engine(engine_config(max_running_sequences=8, tenant_slowdown=0.0))
    for number in range(12):
        engine.add(request([number + 1] * 4, fair_share_key="a", max_new_tokens=50))
    engine.step()
    assert engine.load().running_requests == 8
    other, _ = make_engine(engine_config(max_running_sequences=8, tenant_slowdown=0.0))
    other.add(request([99] * 4, fair_share_key="b", max_new_tokens=50))
    for number in range(12):
        other.add(request([number + 1] * 4, fair_share_key="a", max_new_tokens=50))
    other.step()
    # Six are three quarters of eight.
    assert other.load().running_requests == 7


def test_a_crowd_rests_as_long_as_its_steps_are_slow() -> None:
    turns = FairTurns(1.5)
    widths = {"a": 40, "b": 2}
    assert turns.choose(widths) == frozenset()
    turns.stepped(0.04, 0.01, is_light=False)
    rested = 0
    while turns.choose(widths):
        turns.stepped(0.01, 0.01, is_light=True)
        rested += 1
    # (40 + 5 x 10) / 6 = 15 ms.
    assert rested == 5
    turns.stepped(0.04, 0.01, is_light=False)
    assert turns.choose({"a": 40}) == frozenset()
    assert turns.choose({"a": 12, "b": 10}) == frozenset()


# One that another backend began is started late as well, so only its deadline ends it.
@pytest.mark.parametrize("resumed", [(), ((3, 4),)])
def test_expired_work_is_never_prefilled(resumed: tuple[tuple[int, ...], ...]) -> None:
    engine, runner = make_engine(engine_config(), clock=lambda: now)
    now = 0.0
    engine.add(request([1] * 8, deadline=1.0, resumed_token_ids=resumed))
    now = 1.5
    (output,) = engine.step()
    assert output.finished is not None
    assert isinstance(output.finished.error, DeadlineExceeded)
    assert not runner.steps


def test_a_request_that_cannot_end_in_time_any_more_is_not_begun() -> None:
    """It was accepted, and what runs before it took longer than forecast."""
    now = [0.0]
    engine, runner = make_engine(engine_config(max_running_sequences=1), clock=lambda: now[0])
    engine.add(request([1] * 4, max_new_tokens=20))
    for _ in range(5):
        now[0] += 0.1
        engine.step()
    engine.add(request([2] * 4, max_new_tokens=20, arrival_time=now[0], deadline=now[0] + 4.0, request_id="late"))
    now[0] += 3.0
    ended = [output for output in engine.step() if output.finished is not None]
    assert [output.request.request_id for output in ended] == ["late"]
    assert ended[0].finished is not None
    assert isinstance(ended[0].finished.error, DeadlineExceeded)
    assert all(entry.sequence.token_ids[0] == 1 for step in runner.steps for entry in step.scheduled)


def test_at_a_lower_speed_than_forecast_it_is_not_begun_either() -> None:
    """It would have had the time at the speed of its arrival; now it would take another's place and end late."""
    now, took = [0.0], []
    engine, runner = make_engine(engine_config(max_running_sequences=1), clock=lambda: now[0])

    def step(seconds: float) -> None:
        took.append(seconds)
        now[0] += seconds
        ended.extend(output.request.request_id for output in engine.step() if output.finished is not None)

    ended: list[str] = []
    engine.add(request([1] * 4, max_new_tokens=60, request_id="first"))
    for _ in range(20):
        step(0.1)
    # Twenty steps of 0.1 s, and 30 s for them: begun while 16 s were left at least.
    engine.add(request([2] * 4, max_new_tokens=20, arrival_time=now[0], deadline=now[0] + 56.0, request_id="late"))
    while "first" not in ended:
        step(1.0)
    step(1.0)
    assert now[0] < 2.0 + 56.0 - 0.8 * 21 * 0.1
    assert ended == ["first", "late"]
    assert all(entry.sequence.token_ids[0] == 1 for step in runner.steps for entry in step.scheduled)


def test_a_crowd_that_began_together_keeps_the_next_one_waiting() -> None:
    """Throughput says that a place is free all the time; in truth none is before all of them end."""
    now = [0.0]
    engine, _ = make_engine(engine_config(max_running_sequences=4), clock=lambda: now[0])

    def step() -> None:
        now[0] += 0.1
        engine.step()

    for number in range(6):
        engine.add(request([number + 1] * 4, max_new_tokens=40, arrival_time=now[0]))
    while engine.has_work:
        step()
    for number in range(4):
        engine.add(request([number + 1] * 4, max_new_tokens=40, arrival_time=now[0]))
    step()
    pace, demand = engine.load().pace, Demand("", 4, 40)
    # They end 40 steps after they began; half of that would be so if they had begun one after the other.
    assert pace.uneven_seconds == pytest.approx(2.0, abs=0.3)
    assert pace.wait_seconds(demand) >= pace.uneven_seconds
    for _ in range(30):
        step()
    assert engine.load().pace.uneven_seconds == 0.0


def crowded(now: list[float], *, arrived: float) -> Engine:
    """An engine of eight places with nothing of the tenant "a" left in it, and a flood of "b" waiting."""
    engine, _ = make_engine(engine_config(max_running_sequences=8, tenant_slowdown=0.0), clock=lambda: now[0])
    engine.add(request([99] * 4, fair_share_key="a", max_new_tokens=2))
    while engine.has_work:
        engine.step()
    now[0] = arrived
    for number in range(12):
        engine.add(request([number + 1] * 4, fair_share_key="b", max_new_tokens=150, arrival_time=arrived))
    engine.step()
    return engine


def test_a_tenant_that_left_is_forgotten_while_nobody_comes() -> None:
    """A batch that came as a whole has all places once the others' time is over."""
    now = [0.0]
    engine = crowded(now, arrived=1.0)
    assert engine.load().running_requests == 6
    now[0] = 9.0
    engine.step()
    assert engine.load().running_requests == 6
    now[0] = 11.0
    engine.step()
    assert engine.load().running_requests == 8


def test_a_tenant_is_remembered_from_the_end_of_its_last_request() -> None:
    now = [0.0]
    engine, _ = make_engine(engine_config(max_running_sequences=8, tenant_slowdown=0.0), clock=lambda: now[0])
    engine.add(request([99] * 4, fair_share_key="a", max_new_tokens=30))
    for step in range(40):
        now[0] = float(step)
        engine.step()
    assert not engine.has_work
    now[0] = 35.0
    for number in range(12):
        engine.add(request([number + 1] * 4, fair_share_key="b", max_new_tokens=150, arrival_time=35.0))
    engine.step()
    assert engine.load().running_requests == 6


def test_a_request_that_was_aborted_says_nothing_about_the_length_of_answers() -> None:
    """It is no shorter than what it had; that it was ended is not why others would be short."""
    engine, _ = make_engine(engine_config())
    demand = Demand("", 4, 100)

    def cut_short() -> None:
        for _ in range(20):
            engine.add(request([1] * 4, request_id="cut", max_new_tokens=100))
            for _ in range(3):
                engine.step()
            engine.abort("cut")
            engine.step()

    cut_short()
    assert engine.load().pace.output(demand) == 100, "nothing is known"
    run(engine, request([1] * 4, max_new_tokens=100))
    cut_short()
    assert engine.load().pace.output(demand) == pytest.approx(100)


@pytest.mark.parametrize("begun", [{"resumed_token_ids": [[7]]}, {"purpose": Purpose.EMBED}])
def test_what_is_begun_is_not_cut_off_before_its_deadline(begun: dict[str, Any]) -> None:
    """A stream that moved here, whose caller has tokens, and an item of several."""
    now = [0.0]
    engine, _ = make_engine(engine_config(max_running_sequences=1), clock=lambda: now[0])
    engine.add(request([1] * 4, max_new_tokens=20))
    for _ in range(5):
        now[0] += 0.1
        engine.step()
    moved = request([2] * 4, max_new_tokens=20, arrival_time=now[0], deadline=now[0] + 4.0, request_id="moved")
    engine.add(dataclasses.replace(moved, **begun))
    # Less is left than twenty steps take, and the deadline is not reached.
    now[0] += 3.95
    assert "moved" not in {output.request.request_id for output in engine.step() if output.finished is not None}
    now[0] += 0.1
    (late,) = [output for output in engine.step() if output.finished is not None]
    assert late.request.request_id == "moved"


def test_prompts_progress_beside_all_decoding_sequences_of_several_tenants() -> None:
    config = engine_config(max_batch_tokens=12, max_running_sequences=8)
    assert TenantShares(config).step_tokens == 12
    assert TenantShares(engine_config(max_batch_tokens=8, max_running_sequences=8)).step_tokens == 8
    assert TenantShares(engine_config(max_batch_tokens=512, max_running_sequences=64)).step_tokens == 128
    engine, runner = make_engine(config)
    for number in range(7):
        engine.add(request([number + 1], fair_share_key="ab"[number % 2], max_new_tokens=40))
    engine.step()
    engine.add(request([99] * 25, fair_share_key="a", max_new_tokens=1))
    for _ in range(5):
        engine.step()
    prompts = [
        entry.num_tokens for step in runner.steps for entry in step.scheduled if entry.sequence.token_ids[0] == 99
    ]
    assert prompts == [5] * 5


def test_a_flood_that_fills_the_pool_leaves_another_tenants_p99_within_twice_of_its_solo() -> None:
    """Long answers of a flood hold all blocks; its last request gives way to whoever comes, and to whoever grows."""
    pool: dict[str, Any] = {"num_blocks": 256, "max_context_tokens": 1000}
    quiet = Flow(5.0, tenant="b", begin=1.0, end=SECONDS)
    (solo,) = simulate([quiet], **pool)
    flood = Flow(30.0, tenant="a", end=SECONDS, output_tokens=(200, 400))
    crowd, beside = simulate([flood, quiet], **pool)
    assert not beside.refused
    assert not beside.late
    assert beside.p99 <= 2 * solo.p99
    # Those that gave way go on later.
    assert not crowd.late


def test_nobody_gives_way_to_a_request_that_would_not_fit_all_the_same() -> None:
    engine, _ = make_engine(engine_config(num_blocks=20, reserve_share=0.0, tenant_slowdown=0.0))
    for number in range(3):
        engine.add(request([number + 1] * 16, fair_share_key="a", max_new_tokens=6))
    answers: dict[str, Answer] = {}
    collect(answers, engine.step())
    engine.add(request([9] * 70, fair_share_key="b", max_new_tokens=6, request_id="wide"))
    run(engine, answers=answers)
    assert engine.stats.preemptions == 0
    assert answers["wide"].finished is not None
    assert answers["wide"].finished.error is None


def test_the_first_request_never_gives_way() -> None:
    engine, _ = make_engine(engine_config(num_blocks=20, reserve_share=0.0, tenant_slowdown=0.0))
    engine.add(request([1] * 60, fair_share_key="a", max_new_tokens=12, request_id="first"))
    answers: dict[str, Answer] = {}
    collect(answers, engine.step())
    engine.add(request([9] * 20, fair_share_key="b", max_new_tokens=6))
    assert run(engine, answers=answers)["first"].finished is not None
    assert engine.stats.preemptions == 0
