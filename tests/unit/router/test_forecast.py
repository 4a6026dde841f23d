"""Forecasts at the router: what is coming and what was sent count, the best backend decides, nothing is left behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from penstock.common.errors import ResourceExhausted
from penstock.common.pace import Demand, Pace
from penstock.router.backends.forecast import Forecast
from penstock.router.config import RouterConfig

BUSY = Pace(tokens_per_second=100.0, step_seconds=0.01, full_step_seconds=0.01, is_busy=True, waiting={"a": 300.0})
IDLE = Pace(tokens_per_second=100.0, step_seconds=0.01, full_step_seconds=0.01, least_step_seconds=0.01)
SMALL = Demand("a", 10, 10)


def forecast(*paces: Pace, sent: dict[str, float] | None = None) -> Forecast:
    backends = [SimpleNamespace(pace=pace, sent_tokens=sent or {}) for pace in paces]
    pool: Any = SimpleNamespace(ready=lambda _: backends)
    return Forecast(pool, RouterConfig())


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


def test_expected_requests_count_until_they_have_a_backend() -> None:
    gate = forecast(BUSY)
    done = [gate.expect("m", SMALL, 5.0) for _ in range(7)]
    with pytest.raises(ResourceExhausted):
        gate.expect("m", SMALL, 4.5)
    for one in done:
        one()
    gate.expect("m", SMALL, 4.5)


def test_what_was_sent_since_the_report_counts() -> None:
    with pytest.raises(ResourceExhausted):
        forecast(BUSY, sent={"a": 200.0}).expect("m", SMALL, 4.5)


def test_a_backend_that_reports_no_pace_refuses_nothing() -> None:
    forecast(Pace()).expect("m", SMALL, 0.001)
    forecast().expect("m", SMALL, 0.001)


def test_a_request_that_an_idle_engine_could_not_end_is_let_in_unless_others_wait() -> None:
    long = Demand("a", 10, 1000)
    assert IDLE.seconds_late(long, 0.5) == 0.0
    assert BUSY.seconds_late(long, 0.5) > 0.0
