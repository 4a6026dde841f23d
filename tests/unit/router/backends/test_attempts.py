"""Room at the backends is set aside while a prompt is made, so that a flood is refused before work is put into it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from penstock.common.errors import Internal, ResourceExhausted
from penstock.router.backends.attempts import Attempts
from penstock.router.backends.crash_log import Blame, CrashLog
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.probation import StreamProbation
from penstock.router.requests.suspect import Suspect
from prometheus_client import CollectorRegistry


def attempts(*rooms: float) -> Attempts:
    """Over backends with this much room."""
    pool: Any = SimpleNamespace(
        ready=lambda *_: [SimpleNamespace(load=SimpleNamespace(room=room)) for room in rooms],
        usable=lambda *_: [SimpleNamespace(load=SimpleNamespace(room=room)) for room in rooms],
    )
    policy: Any = None
    return Attempts(pool, policy, RouterConfig(), RouterMetrics(CollectorRegistry()))


def test_room_is_set_aside_until_it_is_given_back() -> None:
    tries = attempts(2, 1)
    done = [tries.prepare("m") for _ in range(3)]
    with pytest.raises(ResourceExhausted) as caught:
        tries.prepare("m")
    assert caught.value.retry_after_seconds
    done[0]()
    tries.prepare("m")


def test_a_backend_beyond_its_bound_takes_no_room_from_another() -> None:
    tries = attempts(-5, 1)
    tries.prepare("m")
    with pytest.raises(ResourceExhausted):
        tries.prepare("m")


async def test_a_request_that_passed_its_probation_is_cleared_of_the_crashes_before_it() -> None:
    crashes = CrashLog(lambda: None)
    pool: Any = SimpleNamespace(crashes=crashes)
    policy: Any = None
    tries = Attempts(pool, policy, RouterConfig(), RouterMetrics(CollectorRegistry()))
    one, beside = Suspect(0.0), Suspect(0.0)

    def crash(*suspects: Suspect) -> None:
        crashes.resolve(crashes.note(suspects), is_confirmed=True)

    crash(one, beside)
    crash(one, beside)
    assert crashes.blame(one) is Blame.SHARED
    state: Any = SimpleNamespace(
        suspect=one, attempts=2, num_tokens=10, finished=None, closed=False, attempt=SimpleNamespace()
    )
    probation = StreamProbation(state, 5, 0.0)
    probation.had_company = True
    state.attempts, state.num_tokens = 3, 100
    # Long after it passed, and before anybody asked, its backend crashes by something else.
    crash(one)
    assert await tries.check_blame(one) is Blame.SUSPECTED
    assert len(one.crashes) == 1
    # That is held against it as anybody's: where backends crashed without it, it takes three.
    for _ in range(2):
        crash(one)
    with pytest.raises(Internal):
        await tries.check_blame(one)


def test_a_backend_that_reports_no_bound_has_room() -> None:
    tries = attempts(0, float("inf"))
    for _ in range(100):
        tries.prepare("m")
