"""Age of load reports: the quickest report is new, whatever the clocks say."""

from __future__ import annotations

import pytest
from penstock.router.backends.report_age import MOST_SECONDS, ReportAge


@pytest.mark.parametrize("begin", [1e-3, 1000.0, 1e9])
def test_a_report_is_as_old_as_it_took_longer_than_the_quickest(begin: float) -> None:
    age = ReportAge()
    assert age.of(begin, 50.0) == 0.0
    assert age.of(begin + 1.0, 51.02) == pytest.approx(0.02, abs=1e-3)
    assert age.of(begin + 2.0, 51.9) == 0.0, "the quickest"
    assert age.of(begin + 3.0, 53.0) == pytest.approx(0.1, abs=1e-3)


def test_a_clock_that_drifts_ages_nothing_for_ever() -> None:
    age = ReportAge()
    for second in range(10_000):
        oldest = age.of(1.0 + second * (1 - 5e-5), float(second))
    assert oldest < 1e-3


def test_an_age_has_a_bound_and_an_old_release_tells_none() -> None:
    age = ReportAge()
    age.of(1.0, 1.0)
    assert age.of(2.0, 500.0) == MOST_SECONDS
    assert age.of(0.0, 501.0) == 0.0
