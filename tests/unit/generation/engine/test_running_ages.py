"""Ages of running requests: a crowd that began together gives no place back for a while."""

from __future__ import annotations

import pytest
from penstock.generation.engine.expected_time import ExpectedTime
from penstock.generation.engine.running_ages import RunningAges

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
