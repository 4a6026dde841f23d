"""Histograms that take equal observations together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from penstock.common.histograms import StepHistogram
from prometheus_client import CollectorRegistry, generate_latest


def made() -> tuple[StepHistogram, CollectorRegistry]:
    registry = CollectorRegistry()
    return StepHistogram("gap_seconds", "Gaps.", {}, (0.5, 1.0, 2.0), registry), registry


VALUES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 2.0, 4.0])


@given(st.lists(st.tuples(VALUES, st.integers(1, 4), st.booleans())))
def test_equal_observations_in_a_row_count_as_single_ones(events: list[tuple[float, int, bool]]) -> None:
    (one, page_of_one), (other, page_of_other) = made(), made()
    for value, times, is_read in events:
        for _ in range(times):
            one.observe_one(value)
            other.observe(value)
        if is_read:
            assert generate_latest(page_of_one) == generate_latest(page_of_other)
    assert generate_latest(page_of_one) == generate_latest(page_of_other)


def test_both_ways_to_observe_count_together() -> None:
    histogram, page = made()
    for _ in range(3):
        histogram.observe_one(0.75)
    histogram.observe(0.75, 2)
    assert 'gap_seconds_bucket{le="1.0"} 5.0' in generate_latest(page).decode()
