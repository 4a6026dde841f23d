"""The pace of a batch's lines beside callers, in a time of its own."""

from __future__ import annotations

from itertools import pairwise

from penstock.jobs.start_pace import StartPace


class Clock:
    """A clock that is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_any_number_starts_while_nobody_is_there() -> None:
    pace = StartPace(10.0, 1.0, Clock())
    assert (pace.room(16), pace.room(16), pace.wait_seconds()) == (16, 16, 0.0)


def test_beside_a_caller_they_start_one_by_one_and_evenly() -> None:
    clock = Clock()
    pace, started = StartPace(10.0, 1.0, clock), []
    with pace.caller():
        while clock.now < 101.0:
            if pace.room(16):
                started.append(clock.now)
            clock.now += 0.01
    gaps = [later - earlier for earlier, later in pairwise(started)]
    assert 9 <= len(started) <= 10
    assert min(gaps) > 0.09
    assert pace.room(0) == 0


def test_the_pace_holds_for_a_while_after_the_last_caller() -> None:
    clock = Clock()
    pace = StartPace(0.1, 1.0, clock)
    with pace.caller():
        assert (pace.room(16), pace.room(16)) == (1, 0)
        assert pace.wait_seconds() == 10.0
    assert pace.wait_seconds() == 1.0
    clock.now += 0.5
    assert (pace.room(16), pace.wait_seconds()) == (0, 0.5)
    clock.now += 0.5
    assert (pace.wait_seconds(), pace.room(16)) == (0.0, 16)


def test_without_a_pace_callers_change_nothing() -> None:
    pace = StartPace(0.0, 1.0, Clock())
    with pace.caller():
        assert (pace.room(16), pace.wait_seconds()) == (16, 0.0)
