"""Times that end requests: what a step may skip, and what it must not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from factories.engine.fake_engine import request
from penstock.generation.core.request import Request
from penstock.generation.engine.end_times import EndTimes
from penstock.generation.engine.expected_time import ExpectedTime


@dataclass(eq=False)
class Group:
    """Stand-in for a SequenceGroup: what these times read of it."""

    request: Request
    expected: Any
    report: Any = field(default_factory=lambda: SimpleNamespace(scheduled_at=None))


def group(*, deadline: float | None = None, max_time: float | None = None, seconds: float = 0.0) -> Any:
    """Make a request that takes `seconds` from its first step to its end."""
    asked = request([1], deadline=deadline, max_time=max_time)
    expected = SimpleNamespace(latest_start=lambda end, step: end - seconds, step_seconds=1.0)
    return Group(asked, expected)


def test_nothing_is_due_before_the_earliest_of_all_times() -> None:
    times = EndTimes()
    assert times.earliest == math.inf
    times.accept(group(deadline=9.0, seconds=9.5))
    assert times.earliest == 9.0, "the deadline: there is not enough time from the start"
    times.accept(group(deadline=8.0, seconds=3.0))
    assert times.earliest == 5.0, "the latest start"
    begun = group(max_time=2.0)
    begun.report.scheduled_at = 1.0
    times.accept(begun)
    times.begin(begun)
    assert times.earliest == 3.0, "the end of max_time"


@pytest.mark.parametrize("kind", ["deadline", "latest start", "max_time"])
def test_what_was_due_is_not_looked_for_again(kind: str) -> None:
    times = EndTimes()
    # The first has no latest start: there is not enough time from the start.
    late = group(deadline=3.0, seconds=3.5) if kind == "deadline" else group(deadline=9.0, seconds=6.0)
    if kind == "max_time":
        late = group(max_time=3.0)
        late.report.scheduled_at = 0.0
        times.begin(late)
    times.accept(late)
    assert times.earliest == 3.0
    found = [one for one, _ in times.too_late(3.5)] + list(times.over_max_time(3.5))
    assert found == [late]
    # A step that finds nothing due costs no more than this look.
    assert times.earliest == (9.0 if kind == "latest start" else math.inf)


def test_a_request_that_has_ended_is_looked_for_once() -> None:
    times, ended = EndTimes(), group(deadline=2.0)
    times.accept(ended)
    times.forget(ended)
    assert not [*times.too_late(2.5)]
    assert times.earliest == math.inf


def test_an_expected_time_ends_a_wait_before_the_deadline() -> None:
    waits = group(deadline=10.0)
    waits.expected = ExpectedTime(step_seconds=1.0, prompt_steps=1, output_steps=4.0)
    times = EndTimes()
    times.accept(waits)
    assert times.have_latest_starts
    assert 0.0 < times.earliest < 10.0
