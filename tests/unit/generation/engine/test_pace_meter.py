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
    return made.pace({}, 0.0, 0 if is_busy else 3, is_idle=False)


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


def most_headroom(made: PaceMeter) -> float:
    """The factor of a request that waits for long."""
    return pace(made).headroom_of(100.0, 1.0)


def test_the_headroom_grows_with_the_wait() -> None:
    made = meter(*[0.1] * 10)
    for free in (0, 3):
        factors = [made.pace({}, 0.0, free, is_idle=False).headroom_of(wait, 8.0) for wait in (0.0, 1.0, 2.0, 50.0)]
        assert factors == pytest.approx([1.2, 1.8, 2.4, 2.4])
    assert pace(made).headroom_of(0.0, 0.0) == pytest.approx(2.4)


def test_a_crowd_that_is_accepted_in_one_moment_leaves_room_for_no_more_and_no_less_in_the_next() -> None:
    """Requests are judged alike before the engine has seen the crowd and after it."""
    made = meter(*[0.1] * 100)
    crowd = {"": 1500.0}
    coming = made.pace({}, 0.0, 0, is_idle=False)
    waiting = made.pace(crowd, 0.0, 0, is_idle=False)
    assert waiting.seconds_late(DEMAND, 3.0) == pytest.approx(coming.seconds_late(DEMAND, 3.0, crowd))
    # Before, the first that waited doubled the headroom of all others.
    first = made.pace({"": 20.0}, 0.0, 0, is_idle=False)
    assert first.seconds_late(DEMAND, 2.0) == 0.0


def test_those_that_come_before_it_wait_for_nobody_while_there_are_places() -> None:
    made = meter(*[0.1] * 100)
    free = made.pace({}, 0.0, 3, is_idle=False)
    assert free.wait_seconds(DEMAND, {"": 40.0}) == 0.0
    assert free.wait_seconds(DEMAND, {"": 60.0}) == pytest.approx(0.02)


def test_a_request_that_took_longer_than_forecast_leaves_more_headroom() -> None:
    made = meter(*[0.1] * 100)
    expected = made.expect(DEMAND, pace(made))
    assert expected.wait_seconds > 0
    for _ in range(20):
        made.started(expected, 0.0, 1.0)
        made.ended(expected, 0.0, 1.0, 3.5 * expected.seconds(10.0), 10.0)
    assert most_headroom(made) == pytest.approx(3.5, abs=0.05)


def test_a_longer_answer_than_expected_is_no_error_of_the_forecast() -> None:
    made = meter(*[0.1] * 100)
    expected = made.expect(DEMAND, pace(made))
    for _ in range(20):
        made.started(expected, 0.0, 1.0)
        made.ended(expected, 0.0, 1.0, expected.seconds(1000.0), 1000.0)
    assert most_headroom(made) == pytest.approx(1.2 * 2.0)


def test_one_that_never_began_teaches_by_how_long_it_waited() -> None:
    made = meter(*[0.1] * 100)
    expected = made.expect(DEMAND, pace(made))
    for _ in range(20):
        made.ended(expected, 0.0, None, 3.0 * expected.wait_seconds, 0.0)
    assert most_headroom(made) == pytest.approx(3.0, abs=0.05)
