"""Outcomes of one backend's attempts: one loss is one, and what an unready backend refuses is no failure of it."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.router.backends.discovery import BackendAddress
from penstock.router.backends.outcome_count import OutcomeCount
from penstock.router.backends.outliers import Outcome, Probe
from penstock.router.metrics import RouterMetrics
from prometheus_client import CollectorRegistry

LOSS_SECONDS = 2.0


class Noted:
    """Outliers that only note what they are told, and the count before them."""

    def __init__(self) -> None:
        self.now, self.is_ready = 10.0, True
        self.outcomes: list[Outcome] = []
        self.of_probes: list[Outcome] = []
        self.registry = CollectorRegistry()
        outliers: Any = self
        self.count = OutcomeCount(
            BackendAddress("127.0.0.1:1", "a:1"),
            outliers,
            RouterMetrics(self.registry),
            LOSS_SECONDS,
            takes_work=lambda: self.is_ready,
            clock=lambda: self.now,
        )

    def note(self, _: str, outcome: Outcome, probe: Probe | None = None, *, has_begun: bool = False) -> None:
        (self.outcomes if probe is None else self.of_probes).append(outcome)


@pytest.fixture
def noted() -> Noted:
    return Noted()


def test_a_loss_counts_once_however_many_calls_it_takes_with_it(noted: Noted) -> None:
    for _ in range(7):
        noted.count.note(Outcome.LOST)
    assert noted.outcomes == [Outcome.LOST]
    noted.now += LOSS_SECONDS
    noted.count.note(Outcome.LOST)
    assert noted.outcomes == [Outcome.LOST] * 2
    noted.count.connect()
    noted.count.note(Outcome.LOST)
    assert noted.outcomes == [Outcome.LOST] * 3, "another connection is another loss"


def test_every_probe_that_is_lost_has_failed(noted: Noted) -> None:
    for _ in range(2):
        noted.count.note(Outcome.LOST, Probe(0.0))
    assert noted.of_probes == [Outcome.LOST] * 2


def test_a_backend_that_is_not_ready_refuses_by_right(noted: Noted) -> None:
    noted.is_ready = False
    noted.count.note(Outcome.UNAVAILABLE)
    noted.count.note(Outcome.NEUTRAL)
    assert noted.outcomes == [Outcome.NEUTRAL]
    failures = noted.registry.get_sample_value(
        "penstock_router_backend_failures_total", {"backend": "a:1", "kind": "unavailable"}
    )
    assert failures == 1.0
