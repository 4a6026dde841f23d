"""Forecasts at the router: what is coming and what was sent count, the best backend decides, nothing is left behind."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from penstock.common.errors import ResourceExhausted, from_status, to_status, trailing_metadata
from penstock.common.pace import Demand, Pace
from penstock.router.backends.forecast import Forecast
from penstock.router.backends.load_report import to_pace
from penstock.router.config import RouterConfig
from penstock.router.frontend.convert import to_demand
from penstock.v1 import admin_pb2, config_pb2, model_pb2, text_pb2

BUSY = Pace(tokens_per_second=100.0, step_seconds=0.01, full_step_seconds=0.01, is_busy=True, waiting={"a": 300.0})
IDLE = Pace(tokens_per_second=100.0, step_seconds=0.01, full_step_seconds=0.01, least_step_seconds=0.01)
SMALL = Demand("a", 10, 10)


def _backend(pace: Pace, sent: dict[str, float], since: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(load=SimpleNamespace(pace=pace, sent_tokens=sent, seconds_since=since))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def forecast(
    *paces: Pace, sent: dict[str, float] | None = None, clock: Clock | None = None, since: float = 0.0
) -> Forecast:
    backends = [_backend(pace, sent or {}, since) for pace in paces]
    ejected = [_backend(IDLE, {})]
    pool: Any = SimpleNamespace(ready=lambda _: [*backends, *ejected], usable=lambda _: backends)
    return Forecast(pool, RouterConfig(), clock or Clock())


def test_a_request_is_refused_when_every_backend_would_be_late() -> None:
    with pytest.raises(ResourceExhausted) as caught:
        forecast(BUSY, BUSY).expect("m", SMALL, 1.0)
    assert caught.value.reason == "OVERLOADED"
    # 320 tokens at 100 a second, and 11 steps.
    assert caught.value.retry_after_seconds == pytest.approx(3.31 - 0.95)
    forecast(BUSY, IDLE).expect("m", SMALL, 1.0)
    forecast(BUSY).expect("m", SMALL, None)


def test_another_tenant_waits_for_its_turns_only() -> None:
    forecast(BUSY).expect("m", Demand("b", 10, 10), 1.0)


def test_a_crowd_that_began_together_counts_and_a_service_of_the_last_release_tells_of_none() -> None:
    report = admin_pb2.Load(pace=admin_pb2.Pace(tokens_per_second=100.0, step_seconds=0.01, headroom=1.0, is_busy=True))
    forecast(to_pace(report)).expect("m", SMALL, 1.0)
    report.pace.uneven_seconds = 2.0
    with pytest.raises(ResourceExhausted):
        forecast(to_pace(report)).expect("m", SMALL, 1.0)


def test_expected_requests_count_until_they_have_a_backend() -> None:
    gate = forecast(BUSY)
    done = [gate.expect("m", SMALL, 5.0) for _ in range(7)]
    with pytest.raises(ResourceExhausted):
        gate.expect("m", SMALL, 4.5)
    for one in done:
        one()
    gate.expect("m", SMALL, 4.5)


def test_requests_of_no_size_leave_nothing_behind_either() -> None:
    gate = forecast(BUSY)
    done = [gate.expect("m", Demand("a", *size), None) for size in ((0, 0), (10, 10), (0, 0))]
    for one in done:
        one()
    assert not gate._coming["m"]


def test_an_impossible_width_does_not_count_against_others() -> None:
    request = text_pb2.GenerateTextRequest(text="a", config=config_pb2.GenerationConfig(num_beams=1 << 31))
    info = model_pb2.GetModelInfoResponse(limits=model_pb2.Limits(max_context_tokens=100, max_running_sequences=8))
    assert to_demand(request, "a", info).sequences == 8


def test_what_was_sent_since_the_report_counts() -> None:
    with pytest.raises(ResourceExhausted):
        forecast(BUSY, sent={"a": 200.0}).expect("m", SMALL, 4.5)


def test_what_the_engine_has_done_since_the_report_counts() -> None:
    """Else those that come just behind a report are let in at once, and later ones wait for the next report."""
    # 5.2 s of work are before it, which takes 0.11 s; 95 % of the deadline count.
    with pytest.raises(ResourceExhausted):
        forecast(BUSY, sent={"a": 200.0}).expect("m", SMALL, 5.4)
    forecast(BUSY, sent={"a": 200.0}, since=0.2).expect("m", SMALL, 5.4)


def passes(gate: Forecast, left: float) -> bool:
    try:
        gate.expect("m", SMALL, left)()
    except ResourceExhausted:
        return False
    return True


def test_while_engines_refuse_what_passed_the_router_is_stricter() -> None:
    # 3.31 s are forecast.
    clock = Clock()
    gate = forecast(BUSY, clock=clock)
    assert passes(gate, 3.5)
    gate.note_refused(SMALL.tenant)
    assert not passes(gate, 3.5)
    assert passes(gate, 3.6)
    # The engine's refusals at one moment have one cause.
    gate.note_refused(SMALL.tenant)
    assert passes(gate, 3.6)
    for _ in range(100):
        clock.now += 0.2
        gate.note_refused(SMALL.tenant)
    assert not passes(gate, 5.3)
    assert passes(gate, 5.6)


def test_one_tenants_refusals_make_the_router_no_stricter_with_others() -> None:
    """A tenant chooses its deadlines: those at the edge of a forecast are refused as often as it likes."""
    clock = Clock()
    gate = forecast(BUSY, clock=clock)
    # 0.4 s of turns, and 11 steps.
    other = Demand("b", 10, 10)
    for _ in range(100):
        clock.now += 0.2
        gate.note_refused(SMALL.tenant)
    assert not passes(gate, 5.3)
    gate.expect("m", other, 0.55)()
    with pytest.raises(ResourceExhausted):
        gate.expect("m", other, 0.5)


def test_tenants_are_forgotten_once_their_refusals_count_no_more() -> None:
    clock = Clock()
    gate = forecast(BUSY, clock=clock)
    for number in range(1000):
        clock.now += 0.2
        gate.note_refused(str(number))
    # Each counts for two seconds.
    assert len(gate._shares) <= 11


def test_once_engines_refuse_no_more_the_router_is_as_before() -> None:
    clock = Clock()
    gate = forecast(BUSY, clock=clock)
    for _ in range(5):
        clock.now += 0.2
        gate.note_refused(SMALL.tenant)
    clock.now += 4.0
    assert not passes(gate, 3.5)
    clock.now += 7.0
    assert passes(gate, 3.5)


def test_a_backend_that_reports_no_pace_refuses_nothing() -> None:
    forecast(Pace()).expect("m", SMALL, 0.001)
    forecast().expect("m", SMALL, 0.001)


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize(
    "field", ["tokens_per_second", "step_seconds", "output_tokens", "headroom", "uneven_seconds", "waiting"]
)
def test_figures_that_no_engine_has_are_none(field: str, figure: float) -> None:
    pace = admin_pb2.Pace(tokens_per_second=1.0, step_seconds=1.0, is_busy=True)
    if field == "waiting":
        pace.waiting.add(fair_share_key="a", tokens=figure)
    else:
        setattr(pace, field, figure)
    gate = forecast(to_pace(admin_pb2.Load(pace=pace)))
    done = gate.expect("m", SMALL, 0.001)
    done()
    assert not gate._coming["m"]


@pytest.mark.parametrize(("seconds", "told"), [(math.nan, 0.0), (math.inf, 86_400.0), (-1.0, 0.0), (2.5, 2.5)])
def test_an_error_asks_for_a_wait_that_there_is(seconds: float, told: float) -> None:
    error = ResourceExhausted("full", reason="OVERLOADED", retry_after_seconds=seconds)
    again = from_status(to_status(error))
    assert again.retry_after_seconds == told
    assert dict(trailing_metadata(error))["grpc-retry-pushback-ms"] == str(int(told * 1000))


def test_a_request_that_an_idle_engine_could_not_end_is_let_in_unless_others_wait() -> None:
    long = Demand("a", 10, 1000)
    assert IDLE.seconds_late(long, 0.5) == 0.0
    assert BUSY.seconds_late(long, 0.5) > 0.0
