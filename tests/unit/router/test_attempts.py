"""Room at the backends is set aside while a prompt is made, so that a flood is refused before work is put into it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from penstock.common.errors import ResourceExhausted
from penstock.router.backends.attempts import Attempts
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from prometheus_client import CollectorRegistry


def attempts(*rooms: float) -> Attempts:
    """Over backends with this much room."""
    pool: Any = SimpleNamespace(
        ready=lambda _: [SimpleNamespace(room=room) for room in rooms],
        usable=lambda _: [SimpleNamespace(room=room) for room in rooms],
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


def test_a_backend_that_reports_no_bound_has_room() -> None:
    tries = attempts(0, float("inf"))
    for _ in range(100):
        tries.prepare("m")
