"""Ejection of backends that fail more than others: causes, bounds, length, probes."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.common.errors import (
    Aborted,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock.router.backends.outliers import Outcome, OutlierConfig, Outliers, outcome_of

CONFIG: dict[str, Any] = {
    "consecutive": 5,
    "share": 0.3,
    "min_requests": 10,
    "window_seconds": 10.0,
    "seconds": 5.0,
    "max_seconds": 120.0,
    "max_share": 0.5,
    "probe_seconds": 10.0,
    "probes": 2,
}


class World:
    """Backends a, b, …; a clock that the test moves; what was told."""

    def __init__(self, count: int = 2, **settings: Any) -> None:
        self.now = 1000.0
        self.keys = list("abcdefgh"[:count])
        self.told: list[tuple[str, str]] = []
        self.outliers = Outliers(
            OutlierConfig(**{**CONFIG, **settings}),
            lambda _: self.keys,
            lambda key, cause: self.told.append((key, cause)),
            clock=lambda: self.now,
            jitter=lambda: 0.5,
        )

    def note(self, key: str, outcome: Outcome, times: int = 1) -> None:
        for _ in range(times):
            self.outliers.note(key, outcome)

    def eject(self, key: str = "a") -> None:
        self.note(key, Outcome.PROTOCOL)
        assert self.outliers.is_ejected(key)

    def probe(self, key: str, outcome: Outcome) -> None:
        assert self.outliers.wants_probe(key)
        probe = self.outliers.begin_probe(key)
        if outcome is Outcome.FINISHED:
            self.outliers.note(key, Outcome.STARTED, probe)
        self.outliers.note(key, outcome, probe)


def test_failures_in_a_row() -> None:
    world = World()
    world.note("a", Outcome.UNAVAILABLE, 4)
    world.note("a", Outcome.STARTED)
    world.note("a", Outcome.UNAVAILABLE, 4)
    assert not world.outliers.is_ejected("a")
    world.note("a", Outcome.UNAVAILABLE)
    assert world.told == [("a", "consecutive")]


def test_a_share_far_above_that_of_the_peers() -> None:
    world = World(consecutive=0)
    world.note("b", Outcome.STARTED, 20)
    for _ in range(4):
        world.note("a", Outcome.UNAVAILABLE)
        world.note("a", Outcome.STARTED)
    assert not world.outliers.is_ejected("a"), "too few to tell"
    world.note("a", Outcome.STARTED)
    world.note("a", Outcome.UNAVAILABLE)
    assert world.told == [("a", "share")]


def test_nobody_stands_out_where_all_fail() -> None:
    world = World(consecutive=0)
    for _ in range(50):
        for key in world.keys:
            world.note(key, Outcome.UNAVAILABLE)
            world.note(key, Outcome.STARTED)
    assert sum(map(world.outliers.is_ejected, world.keys)) == 0


def test_failures_leave_the_window() -> None:
    world = World(consecutive=0)
    for _ in range(30):
        world.note("a", Outcome.UNAVAILABLE)
        world.note("a", Outcome.STARTED, 4)
        world.now += 2.0
    world.note("a", Outcome.UNAVAILABLE, 1)
    assert not world.outliers.is_ejected("a")


def test_errors_of_steps_count_against_those_of_peers_only() -> None:
    world = World()
    world.note("a", Outcome.INTERNAL, 9)
    assert not world.outliers.is_ejected("a")


@pytest.mark.parametrize(("count", "share", "most"), [(1, 1.0, 0), (2, 0.5, 1), (2, 0.0, 1), (4, 0.5, 2), (4, 1.0, 3)])
def test_only_so_many_at_once_and_never_the_last(count: int, share: float, most: int) -> None:
    world = World(count, max_share=share)
    for key in world.keys:
        world.note(key, Outcome.PROTOCOL, 3)
    assert sum(map(world.outliers.is_ejected, world.keys)) == most


def test_each_ejection_is_twice_as_long_up_to_the_longest() -> None:
    world = World(max_seconds=15.0)
    world.eject()
    for seconds in (5.0, 10.0, 15.0, 15.0):
        world.now += seconds - 0.1
        assert not world.outliers.wants_probe("a")
        world.now += 0.2
        world.probe("a", Outcome.UNAVAILABLE)


def test_jitter_is_a_fifth() -> None:
    for value, seconds in ((0.0, 4.0), (1.0, 6.0)):
        world = World()
        world.outliers._jitter = lambda value=value: value  # type: ignore[misc]
        world.eject()
        world.now += seconds - 0.01
        assert not world.outliers.wants_probe("a")
        world.now += 0.02
        assert world.outliers.wants_probe("a")


def test_probes_go_one_at_a_time_and_some_bring_it_back() -> None:
    world = World()
    world.eject()
    world.now += 6.0
    first = world.outliers.begin_probe("a")
    assert not world.outliers.wants_probe("a")
    world.note("a", Outcome.FINISHED)
    assert not world.outliers.wants_probe("a"), "the end of an older attempt says nothing"
    world.outliers.note("a", Outcome.STARTED, first)
    world.outliers.note("a", Outcome.FINISHED, first)
    assert world.outliers.is_ejected("a")
    world.probe("a", Outcome.FINISHED)
    assert not world.outliers.is_ejected("a")
    assert world.told[-1] == ("a", "")


@pytest.mark.parametrize("outcome", [Outcome.UNAVAILABLE, Outcome.LOST, Outcome.PROTOCOL, Outcome.INTERNAL])
def test_a_probe_that_fails_ejects_again(outcome: Outcome) -> None:
    world = World()
    world.eject()
    world.now += 6.0
    world.probe("a", outcome)
    assert world.told[-1] == ("a", "probe")
    world.now += 6.0
    assert not world.outliers.wants_probe("a")


def test_a_probe_that_is_given_up_makes_room_for_the_next() -> None:
    world = World()
    world.eject()
    world.now += 6.0
    world.probe("a", Outcome.NEUTRAL)
    assert world.outliers.wants_probe("a")


def test_a_probe_of_which_nothing_is_heard_ejects_again() -> None:
    world = World()
    world.eject()
    world.now += 6.0
    lost = world.outliers.begin_probe("a")
    world.now += 10.1
    assert not world.outliers.wants_probe("a")
    assert world.told[-1] == ("a", "probe")
    world.now += 11.0
    assert world.outliers.wants_probe("a")
    world.outliers.note("a", Outcome.FINISHED, lost)
    assert world.outliers.wants_probe("a"), "what comes from it later says nothing"


def test_a_probe_that_takes_long_has_passed_once_it_was_taken() -> None:
    world = World(probes=1)
    world.eject()
    world.now += 6.0
    probe = world.outliers.begin_probe("a")
    world.outliers.note("a", Outcome.STARTED, probe)
    world.now += 10.1
    assert not world.outliers.wants_probe("a")
    assert not world.outliers.is_ejected("a")


def test_good_conduct_shortens_the_next_ejection() -> None:
    world = World(probes=1, max_seconds=20.0)
    world.eject()
    world.now += 6.0
    world.probe("a", Outcome.FINISHED)
    world.now += 25.0
    world.eject()
    world.now += 5.1
    assert world.outliers.wants_probe("a")


def test_one_that_is_there_again_is_probed_at_once_but_only_once() -> None:
    world = World()
    world.note("a", Outcome.LOST, times=5)
    world.outliers.half_open("a")
    world.probe("a", Outcome.LOST)
    # It was not well yet: now it takes the time that it takes.
    world.outliers.half_open("a")
    assert not world.outliers.wants_probe("a")
    world.now += CONFIG["max_seconds"]
    for _ in range(CONFIG["probes"]):
        world.probe("a", Outcome.FINISHED)
    world.note("a", Outcome.LOST, times=5)
    world.outliers.half_open("a")
    assert world.outliers.wants_probe("a")


def test_a_liar_that_is_there_again_stays_out() -> None:
    world = World()
    world.eject()
    world.outliers.half_open("a")
    assert not world.outliers.wants_probe("a")


def test_a_new_process_begins_anew() -> None:
    world = World()
    world.eject()
    world.outliers.forget("a")
    assert not world.outliers.is_ejected("a")
    # Who shows ejections learns of it.
    assert world.told[-1] == ("a", "")
    world.outliers.forget("b")
    assert len(world.told) == 2


def test_a_backend_whose_every_request_fails_stands_out_also_where_none_begins() -> None:
    world = World()
    world.note("b", Outcome.STARTED, 20)
    world.note("a", Outcome.INTERNAL, 9)
    assert not world.outliers.is_ejected("a")
    world.note("a", Outcome.INTERNAL)
    assert world.told == [("a", "share")]


@pytest.mark.parametrize("outcome", [Outcome.UNAVAILABLE, Outcome.INTERNAL])
def test_an_attempt_that_begins_and_fails_is_one(outcome: Outcome) -> None:
    world = World(consecutive=0, share=0.6)
    world.note("b", Outcome.STARTED, 20)
    for turn in range(12):
        world.outliers.note("a", Outcome.STARTED)
        if turn % 2:
            world.outliers.note("a", outcome, has_begun=True)
    # Half of them fail.
    assert not world.outliers.is_ejected("a")
    for _ in range(4):
        world.outliers.note("a", Outcome.STARTED)
        world.outliers.note("a", outcome, has_begun=True)
    # 10 of 16.
    assert world.outliers.is_ejected("a")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Unavailable("", reason="ENGINE_FAILED"), Outcome.UNAVAILABLE),
        (Unavailable("", reason="BACKEND_LOST"), Outcome.LOST),
        (Internal("", reason="MODEL_OUTPUT_NAN"), Outcome.INTERNAL),
        (InvalidArgument("prompt", ""), Outcome.NEUTRAL),
        (ResourceExhausted("", reason="QUEUE_FULL"), Outcome.NEUTRAL),
        (DeadlineExceeded("", reason="DEADLINE_EXCEEDED"), Outcome.NEUTRAL),
        (Aborted("", reason="ENGINE_STOPPED"), Outcome.NEUTRAL),
        (Unavailable("", reason="DRAIN_GRACE_OVER"), Outcome.NEUTRAL),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_an_error_says_about_its_backend(error: PenstockError, outcome: Outcome) -> None:
    assert outcome_of(error) is outcome
