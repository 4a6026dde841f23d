"""Headroom of forecasts: there from the start, more of it after errors, and less again after long."""

from __future__ import annotations

import pytest
from penstock.generation.engine.forecast_errors import MOST_HEADROOM, ForecastErrors


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
