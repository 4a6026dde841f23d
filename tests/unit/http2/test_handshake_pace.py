"""Pace of handshakes by network."""

from __future__ import annotations

import pytest
from penstock.http2.handshake_pace import HandshakePace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_network_saves_up_and_then_has_its_share() -> None:
    clock = Clock()
    pace = HandshakePace(0.1, clock)
    begun = 0
    while pace.delay("a") == 0:
        pace.charge("a", 0.001)
        begun += 1
    assert 50 <= begun <= 52
    # A millisecond of work each ten.
    for _ in range(100):
        clock.now += pace.delay("a") + 1e-9
        assert pace.delay("a") == 0
        pace.charge("a", 0.001)
    assert clock.now - 100 == pytest.approx(1.0, abs=0.02)
    # Others do not wait.
    assert pace.delay("b") == 0


def test_a_network_with_credentials_does_not_wait() -> None:
    clock = Clock()
    pace = HandshakePace(0.1, clock)
    for _ in range(10_000):
        assert pace.delay("a") == 0
        pace.charge("a", 0.001)
        pace.forgive("a", 0.001)
    pace.forgive("unknown", 0.001)
    assert pace.delay("unknown") == 0


def test_networks_that_have_gone_are_forgotten() -> None:
    clock = Clock()
    pace = HandshakePace(0.1, clock)
    for number in range(5000):
        clock.now += 0.02
        pace.charge(str(number), 0.001)
    assert len(pace._work) <= 1024
