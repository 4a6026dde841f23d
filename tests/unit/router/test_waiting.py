"""Silence is noticed soon after its time, and a stop of this process is not taken for it."""

from __future__ import annotations

import asyncio

import pytest
from penstock.router import aio


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(aio.asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("limit", [0.05, 3.0, 30.0, 120.0])
@pytest.mark.parametrize("last_sign", [0.0, 0.3, 17.9])
async def test_silence_is_noticed_within_a_second(
    limit: float, last_sign: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    signs = lambda: int(min(clock.now, last_sign) * 1000)  # noqa: E731
    await asyncio.wait_for(aio.until_silent(limit, signs, lambda: True), 60)
    assert last_sign + limit - 1e-6 <= clock.now <= last_sign + limit + 0.6


async def test_nothing_is_silent_while_nothing_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    await aio.until_silent(3.0, lambda: 0, lambda: clock.now > 100.0)
    assert 102.8 <= clock.now <= 103.6, "the look in which something becomes due counts whole"


async def test_a_sign_in_every_look_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, signs = Clock(monkeypatch), 0

    def sign() -> int:
        nonlocal signs
        signs += clock.now < 500.0
        return signs

    await aio.until_silent(3.0, sign, lambda: True)
    assert clock.now >= 502.4, "the last look began before the last sign"
