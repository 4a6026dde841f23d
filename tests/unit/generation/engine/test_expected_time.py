"""Headroom of forecasts, which grows with errors and fades; ages of a crowd that gives no place back for a while."""

from __future__ import annotations

import pytest
from penstock.generation.engine.expected_time import MOST_HEADROOM, ExpectedTime, ForecastErrors, RunningAges

TEN_STEPS = ExpectedTime(prompt_steps=1, output_steps=9.0)


def test_a_crowd_that_came_at_once_ends_half_its_time_later_than_one_that_came_evenly() -> None:
    crowd, even = RunningAges(), RunningAges()
    for number in range(10):
        crowd.began(TEN_STEPS, 0.0)
        even.began(TEN_STEPS, -0.1 * number - 0.05)
    # Steps of 0.1 s: each takes a second.
    assert crowd.uneven_seconds(0.0, 0.1) == pytest.approx(0.5)
    assert even.uneven_seconds(0.0, 0.1) == pytest.approx(0.0)


def test_it_is_made_up_for_as_the_crowd_grows_older() -> None:
    crowd = RunningAges()
    for _ in range(10):
        crowd.began(TEN_STEPS, 0.0)
    assert crowd.uneven_seconds(0.2, 0.1) == pytest.approx(0.3)
    assert crowd.uneven_seconds(0.8, 0.1) == 0.0


def test_slower_steps_make_it_longer() -> None:
    crowd = RunningAges()
    crowd.began(TEN_STEPS, 0.0)
    assert crowd.uneven_seconds(0.2, 0.2) == pytest.approx(0.8)


def test_nothing_is_left_of_those_that_ended() -> None:
    ages = RunningAges()
    for at in (0.1, 0.2, 0.3):
        ages.began(TEN_STEPS, at)
    for at in (0.1, 0.2, 0.3):
        ages.ended(TEN_STEPS, at)
    assert ages.uneven_seconds(0.3, 0.1) == 0.0
    ages.began(TEN_STEPS, 5.0)
    assert ages.uneven_seconds(5.0, 0.1) == pytest.approx(0.5)


def test_there_is_headroom_before_anything_is_known() -> None:
    assert ForecastErrors(2.5).headroom == 2.5


def test_requests_that_took_no_longer_than_it_allows_for_change_nothing() -> None:
    errors = ForecastErrors(2.5)
    for second in range(100):
        errors.note(2.5, 1.0, float(second))
    assert errors.headroom == 2.5


def test_it_grows_towards_the_largest_errors() -> None:
    errors = ForecastErrors(2.0)
    for _ in range(20):
        errors.note(3.0, 1.0, 5.0)
    assert errors.headroom == pytest.approx(3.0, abs=0.01)


def test_it_has_a_bound() -> None:
    errors = ForecastErrors(2.0)
    for _ in range(100):
        errors.note(1e6, 1.0, 5.0)
    assert errors.headroom == pytest.approx(MOST_HEADROOM)
    assert errors.headroom <= MOST_HEADROOM


def test_what_was_learnt_fades() -> None:
    errors = ForecastErrors(2.0)
    for _ in range(20):
        errors.note(3.0, 1.0, 5.0)
    errors.note(1.0, 1.0, 605.0)
    assert errors.headroom == pytest.approx(2.0 + 1.0 / 2.718, abs=0.02)
    errors.note(1.0, 1.0, 1e5)
    assert errors.headroom == pytest.approx(2.0)


def test_a_forecast_of_nothing_teaches_nothing() -> None:
    errors = ForecastErrors(2.0)
    errors.note(5.0, 0.0, 5.0)
    assert errors.headroom == 2.0


def test_a_configured_headroom_above_the_bound_stays() -> None:
    errors = ForecastErrors(5.0)
    errors.note(50.0, 1.0, 5.0)
    assert errors.headroom == 5.0
