"""A slow step is told from one that hangs by what such steps take."""

from __future__ import annotations

import pytest
from factories.engine.fake_engine import engine_config
from penstock.generation.engine.step_watch import StepView, StepWatch


def watch(*, rows: int = 0, **steps: float) -> StepWatch:
    """A watch with one step of `rows` in progress; `steps`: _N=seconds of earlier ones of N rows."""
    made = StepWatch(engine_config(hung_step_seconds=10.0, hung_step_factor=10.0, overdue_step_factor=3.0))
    for name, seconds in steps.items():
        made.note(int(name.removeprefix("_")), seconds)
    made.begin()
    made.num_tokens = rows
    return made


def look(made: StepWatch, seconds: float) -> tuple[bool, bool]:
    view = made.look(made._began + seconds)  # type: ignore[operator]
    assert view.seconds == pytest.approx(seconds)
    return view.is_overdue, view.is_hung


def test_no_step_is_neither_late_nor_hung() -> None:
    made = watch(rows=1, _1=0.01)
    made.end()
    assert made.look(1e9) == StepView()


def test_a_step_of_the_usual_time_is_fine_and_one_far_beyond_it_hangs() -> None:
    made = watch(rows=1, _1=0.2)
    assert look(made, 0.5) == (False, False)
    assert look(made, 0.7) == (True, False)
    assert look(made, 9.9) == (True, False)
    assert look(made, 10.1) == (True, True)


def test_steps_that_take_long_may_take_long() -> None:
    """A large model: a step of 512 rows takes 30 s, which is more than --hung-step-seconds."""
    made = watch(rows=512, _512=30.0)
    assert look(made, 80.0) == (False, False)
    assert look(made, 100.0) == (True, False)
    assert look(made, 301.0) == (True, True)


def test_a_size_that_was_never_seen_is_taken_from_the_next() -> None:
    assert look(watch(rows=512, _1=0.1), 100.0) == (False, False)
    assert look(watch(rows=2, _512=4.0), 11.9) == (False, False)
    assert look(watch(rows=2, _512=4.0), 12.1) == (True, False)


def test_time_in_which_the_process_stood_still_does_not_count() -> None:
    """A container was stopped for a minute amid a step of some seconds."""
    made = watch(rows=1, _1=8.0)
    began = made._began
    assert began is not None
    made._began = began - 70.0
    made.forgive(30.0)
    made.forgive(30.0)
    view = made.look(began)
    assert view.seconds == pytest.approx(10.0)
    assert not view.is_overdue
    made.end()
    # Nor does it make such steps usual.
    made.begin()
    made.num_tokens = 1
    assert look(made, 31.0) == (True, False)


def test_a_step_is_forgiven_no_more_than_it_has_run() -> None:
    made = watch(rows=1, _1=0.01)
    made.forgive(60.0)
    assert made.look(made._began + 11.0).is_hung  # type: ignore[operator]


def test_the_first_step_of_all_has_the_time_of_the_configuration() -> None:
    assert look(watch(rows=512), 9.9) == (False, False)
    assert look(watch(rows=512), 10.1) == (True, True)


def test_commands_have_the_time_of_the_slowest_step() -> None:
    assert look(watch(_1=0.1, _512=2.0), 5.9) == (False, False)
    assert look(watch(_1=0.1, _512=2.0), 6.1) == (True, False)


def test_a_hang_that_ended_is_not_what_steps_take() -> None:
    made = watch()
    made.note(1, 0.01)
    made.note(1, 60.0)
    made.begin()
    made.num_tokens = 1
    assert look(made, 0.8) == (True, False)


def test_steps_that_become_slow_for_good_are_usual_after_some() -> None:
    made = watch()
    made.note(1, 0.01)
    for _ in range(6):
        made.note(1, 5.0)
    made.begin()
    made.num_tokens = 1
    assert look(made, 14.0) == (False, False)


def test_one_slow_moment_is_forgotten() -> None:
    made = watch()
    made.note(1, 60.0)
    for _ in range(100):
        made.note(1, 0.01)
    made.begin()
    made.num_tokens = 1
    assert look(made, 10.1) == (True, True)
