"""The engine's pace on a machine that becomes slow: believed at once, and what was forecast by it."""

from __future__ import annotations

import pytest
from factories.engine.fake_engine import engine_config
from penstock.common.pace import Demand, Pace
from penstock.generation.engine.pace_meter import PaceMeter

DEMAND = Demand("", 10, 10)


def meter(*steps: float, tokens: int = 100) -> PaceMeter:
    """A meter that took steps of so many seconds each, while something waited."""
    made = PaceMeter(engine_config(max_batch_tokens=512))
    for seconds in steps:
        made.stepped(seconds, tokens, something_waited=True, drew=True, is_light=False)
    return made


def pace(made: PaceMeter, *, is_busy: bool = True) -> Pace:
    return made.pace({}, 0.0, is_busy=is_busy, is_idle=False)


def test_a_machine_that_becomes_slow_is_believed_within_a_few_steps() -> None:
    slow = pace(meter(*[0.1] * 200, *[0.3] * 8))
    assert slow.step_seconds > 0.25
    # A thousand tokens a second became 333.
    assert slow.tokens_per_second < 550


def test_that_it_is_fast_again_is_believed_after_a_while() -> None:
    steps = [0.3] * 200 + [0.1] * 8
    assert pace(meter(*steps)).step_seconds > 0.2
    assert pace(meter(*steps, *[0.1] * 100)).step_seconds == pytest.approx(0.1, rel=0.05)


def test_a_single_slow_step_is_not_what_follows() -> None:
    """One with a long prompt: a forecast must not jump for its sake."""
    assert pace(meter(*[0.02] * 100, 0.5)).step_seconds < 0.06


def test_waits_that_were_shorter_than_forecast_make_no_forecast_shorter() -> None:
    made = meter(*[0.1] * 100)
    before = pace(made)
    for _ in range(300):
        made.started(made.expect(DEMAND, before._replace(waiting={"": 1000.0})), 0.0, 0.1)
    assert pace(made).tokens_per_second == pytest.approx(before.tokens_per_second)


def test_only_those_that_wait_need_more_headroom() -> None:
    made = meter(*[0.1] * 10)
    assert pace(made, is_busy=False).headroom == 1.2
    assert pace(made).headroom == pytest.approx(1.2 * 2.0)


def test_a_request_that_took_longer_than_forecast_leaves_more_headroom() -> None:
    made = meter(*[0.1] * 100)
    expected = made.expect(DEMAND, pace(made))
    assert expected.wait_seconds > 0
    for _ in range(20):
        made.started(expected, 0.0, 1.0)
        made.ended(expected, 0.0, 1.0, 3.5 * expected.seconds(10.0), 10.0)
    assert pace(made).headroom == pytest.approx(3.5, abs=0.05)


def test_a_longer_answer_than_expected_is_no_error_of_the_forecast() -> None:
    made = meter(*[0.1] * 100)
    expected = made.expect(DEMAND, pace(made))
    for _ in range(20):
        made.started(expected, 0.0, 1.0)
        made.ended(expected, 0.0, 1.0, expected.seconds(1000.0), 1000.0)
    assert pace(made).headroom == pytest.approx(1.2 * 2.0)


def test_one_that_never_began_teaches_by_how_long_it_waited() -> None:
    made = meter(*[0.1] * 100)
    expected = made.expect(DEMAND, pace(made))
    for _ in range(20):
        made.ended(expected, 0.0, None, 3.0 * expected.wait_seconds, 0.0)
    assert pace(made).headroom == pytest.approx(3.0, abs=0.05)
