"""Load of a backend as the router sees it: the last report, corrected by what was sent since."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.common.pace import Demand
from penstock.router.backends.load_report import LoadReport, from_load
from penstock.router.backends.load_view import LoadView
from penstock.v1 import admin_pb2, common_pb2


class Seen:
    """A backend's view, and the number of our requests there."""

    def __init__(self) -> None:
        self.in_flight = self.idle_in_flight = 0
        self.now = 100.0
        self.view = LoadView(lambda: self.in_flight, lambda: self.idle_in_flight, lambda: self.now)


def test_requests_sent_since_the_report_count() -> None:
    seen = Seen()
    seen.in_flight = 2
    assert seen.view.requests == 2, "nothing is reported yet"
    seen.view.take(LoadReport(waiting_requests=3, running_requests=4, max_queued_requests=5))
    assert (seen.view.requests, seen.view.room, seen.view.is_full) == (7, 2, False)
    seen.in_flight = 4
    assert (seen.view.requests, seen.view.room, seen.view.is_full) == (9, 0, True)
    seen.view.take(LoadReport(waiting_requests=1, running_requests=0, max_queued_requests=5))
    assert seen.view.requests == 4, "never fewer than ours"
    seen.in_flight = 0
    assert (seen.view.requests, seen.view.room) == (0, 8)


def test_requests_of_idle_capacity_press_nobody_where_they_rest() -> None:
    seen = Seen()
    seen.in_flight = seen.idle_in_flight = 2
    assert seen.view.pressing == 2, "not told yet"
    seen.view.take(LoadReport(running_requests=5))
    assert seen.view.pressing == 5, "an engine on which others wait for them"
    seen.view.take(LoadReport(running_requests=5, idle_only_requests=3))
    assert (seen.view.requests, seen.view.pressing) == (5, 2)
    seen.in_flight, seen.idle_in_flight = 4, 3
    assert (seen.view.requests, seen.view.pressing) == (7, 3)
    seen.in_flight = seen.idle_in_flight = 0
    assert (seen.view.requests, seen.view.pressing) == (3, 2)


@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.none() | st.integers(0, 9),
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3),
)
def test_the_standing_is_all_of_these_in_one_reading(
    waiting: int, running: int, idle: int | None, most: int, in_flight: list[tuple[int, int]]
) -> None:
    seen = Seen()
    seen.in_flight, seen.idle_in_flight = in_flight[0]
    report = LoadReport(
        waiting_requests=waiting, running_requests=running, idle_only_requests=idle, max_queued_requests=most
    )
    seen.view.take(report)
    for seen.in_flight, seen.idle_in_flight in in_flight:
        view = seen.view
        wanted = (None, None) if view.is_full else (view.pressing, view.requests)
        assert (view.standing(is_idle_only=False), view.standing(is_idle_only=True)) == wanted


def test_a_report_tells_those_of_idle_capacity_or_does_not() -> None:
    assert from_load(admin_pb2.Load()).idle_only_requests is None
    assert from_load(admin_pb2.Load(idle_only_requests=0)).idle_only_requests == 0


def test_a_queue_without_a_bound_has_room() -> None:
    seen = Seen()
    seen.view.take(LoadReport(waiting_requests=100))
    assert seen.view.room == math.inf


def test_what_was_sent_after_the_figures_were_measured_still_counts() -> None:
    """A late report has figures of a time at which the last requests had not arrived."""
    seen = Seen()
    # It took no time: the quickest of all.
    seen.view.take(LoadReport(measured_at=5.0))
    seen.now += 1.0
    seen.view.note_sent(Demand("a", 10, 0))
    seen.now += 0.05
    seen.view.note_sent(Demand("a", 20, 0))
    seen.view.note_sent(Demand("b", 40, 0))
    seen.now += 0.01
    seen.view.take(LoadReport(measured_at=6.045))
    assert seen.view.sent_tokens == {"a": 20, "b": 40}
    seen.now += 0.1
    seen.view.take(LoadReport(measured_at=6.16))
    assert not seen.view.sent_tokens


def test_figures_grow_old_until_the_next_report() -> None:
    seen = Seen()
    assert seen.view.seconds_since == 0.0
    seen.view.take(LoadReport(measured_at=5.0))
    seen.now += 0.1
    assert seen.view.seconds_since == pytest.approx(0.1)
    # 0.02 s late.
    seen.now += 0.02
    seen.view.take(LoadReport(measured_at=5.1))
    assert seen.view.seconds_since == pytest.approx(0.02, abs=1e-3)
    seen.now += 60.0
    assert seen.view.seconds_since == 0.25, "nothing is known of a backend that has stopped"
    seen.view.take(LoadReport())
    assert seen.view.seconds_since == 0.0, "an older release"


def test_a_backend_that_tells_no_time_counts_all_that_was_sent() -> None:
    seen = Seen()
    seen.view.take(LoadReport())
    seen.view.note_sent(Demand("a", 10, 0))
    seen.view.take(LoadReport())
    assert not seen.view.sent_tokens


def test_tokens_count_until_the_next_report() -> None:
    seen = Seen()
    seen.view.note_sent(Demand("a", 10, 10))
    seen.view.note_sent(Demand("a", 10, 10))
    seen.view.note_sent(Demand("b", 5, 10))
    assert {tenant: int(tokens) for tenant, tokens in seen.view.sent_tokens.items()} == {"a": 40, "b": 15}
    seen.view.take(LoadReport())
    assert not seen.view.sent_tokens


def test_progress_is_another_step_or_one_under_way() -> None:
    view = Seen().view
    for report, progress in (
        (LoadReport(step=1), 1),
        (LoadReport(step=1), 1),
        (LoadReport(step=1, is_stepping=True), 2),
        (LoadReport(step=1, is_overdue=True), 2),
        (LoadReport(step=2), 3),
    ):
        view.take(report)
        assert view.progress == progress
    assert view.num_reports == 5


def test_another_connection_has_reported_nothing() -> None:
    seen = Seen()
    seen.view.take(LoadReport(step=9, waiting_requests=3, kv_pressure=0.5))
    seen.view.connect()
    assert (seen.view.has_report, seen.view.requests, seen.view.kv_pressure, seen.view.progress) == (False, 0, 0, 0)


def test_a_report_becomes_plain_data() -> None:
    load = admin_pb2.Load(
        process_start_id="one",
        step=3,
        step_seconds=0.5,
        draining=True,
        waiting_requests=1,
        running_requests=2,
        max_queued_requests=4,
        kv_blocks_used=1,
        kv_blocks_total=4,
        adapters_version=7,
        state=common_pb2.MODEL_STATE_READY,
    )
    assert from_load(load) == LoadReport(
        start_id="one",
        step=3,
        is_stepping=True,
        is_loaded=True,
        is_draining=True,
        waiting_requests=1,
        running_requests=2,
        max_queued_requests=4,
        kv_pressure=0.25,
        adapters_version=7,
    )
    load.step_overdue, load.step_hung, load.state = True, True, common_pb2.MODEL_STATE_LOADING
    late = from_load(load)
    assert (late.is_stepping, late.is_overdue, late.is_hung, late.is_loaded) == (False, True, True, False)
    # A service of an older release tells little.
    assert from_load(admin_pb2.Load()) == LoadReport(is_loaded=True)
