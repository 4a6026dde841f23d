"""Gathering of tokens while the event loop is behind."""

from __future__ import annotations

import asyncio
import time

import pytest
from factories.servers.router import until
from penstock.router.aio import Wakeup
from penstock.router.requests.delta_buffer import DeltaBuffer, PendingDelta
from penstock.router.requests.delta_pace import DeltaPace

LONG = 60.0


def is_set(wakeup: Wakeup) -> bool:
    return wakeup._is_set


def stand_still() -> None:
    """Keep the loop from its other work."""
    time.sleep(0.05)


async def be_late(pace: DeltaPace) -> None:
    """Stop the loop until it counts as behind."""
    for _ in range(100):
        pace.wake(Wakeup())
        stand_still()
        await asyncio.sleep(0)
        if pace.hold_seconds:
            return
    pytest.fail("a loop that stands still is behind")


async def test_a_loop_that_is_in_time_wakes_at_once() -> None:
    pace, wakeup = DeltaPace(LONG), Wakeup()
    pace.wake(wakeup)
    assert is_set(wakeup)


async def test_a_loop_that_is_behind_gathers_and_then_wakes_all() -> None:
    pace, first, second = DeltaPace(0.2), Wakeup(), Wakeup()
    await be_late(pace)
    pace.wake(first)
    pace.wake(second)
    assert not is_set(first)
    async with asyncio.timeout(LONG):
        await first.wait()
        await second.wait()


async def test_nothing_waits_longer_than_allowed() -> None:
    pace = DeltaPace(0.02)
    await be_late(pace)
    assert pace.hold_seconds <= 0.02


async def test_without_a_bound_nothing_waits() -> None:
    pace, wakeup = DeltaPace(0.0), Wakeup()
    pace.wake(wakeup)
    stand_still()
    await asyncio.sleep(0)
    pace.wake(wakeup)
    assert pace.hold_seconds == 0.0
    assert is_set(wakeup)


async def test_it_looks_only_while_tokens_come() -> None:
    pace = DeltaPace(LONG)
    await be_late(pace)
    await until(lambda: not pace.hold_seconds and not pace._is_looking)


async def test_a_gathered_delta_is_merged_and_the_end_does_not_wait() -> None:
    pace, buffer = DeltaPace(LONG), DeltaBuffer(1024)
    await be_late(pace)
    buffer.pace = pace
    assert buffer.put(PendingDelta(0, "a"))
    assert buffer.put(PendingDelta(0, "b"))
    assert not is_set(buffer.wakeup)
    # As the end of the stream does.
    buffer.wakeup.set()
    await buffer.wakeup.wait()
    assert [delta.text for delta in buffer.take()] == ["ab"]


async def test_the_first_delta_does_not_wait() -> None:
    pace, buffer = DeltaPace(LONG), DeltaBuffer(1024)
    await be_late(pace)
    buffer.put(PendingDelta(0, "a"))
    assert is_set(buffer.wakeup)
