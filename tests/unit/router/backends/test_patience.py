"""Patience of a request that lost its backend: longer for a start, and where another request was to blame."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.router.backends.crash_log import CrashLog
from penstock.router.backends.patience import Patience
from penstock.router.config import RouterConfig
from penstock.router.requests.suspect import Suspect

CONFIG = RouterConfig(failover_wait_seconds=0.0, start_timeout_seconds=3600.0)


def patience(suspect: Suspect, *, is_any_starting: bool = False) -> Patience:
    pool: Any = SimpleNamespace(is_any_starting=lambda _: is_any_starting)
    return Patience(pool, CONFIG, "model", suspect)


def test_it_ends_as_configured_where_nothing_comes() -> None:
    assert patience(Suspect(0.0)).left() <= 0


def test_a_process_that_starts_is_waited_for() -> None:
    assert patience(Suspect(0.0), is_any_starting=True).left() > 0


def test_who_was_beside_a_poison_waits_for_the_processes_that_it_took() -> None:
    crashes, poison, beside = CrashLog(lambda: None), Suspect(0.0), Suspect(0.0)
    waits = patience(beside)
    for suspects in ((poison, beside), (poison,)):
        crashes.resolve(crashes.note(suspects), is_confirmed=True)
    assert waits.left() <= 0
    crashes.mark_poison(poison)
    assert waits.left() > 0
