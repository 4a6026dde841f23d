"""Admission: bounds, order, fairness between tenants, and nothing leaked whatever is cancelled when."""

from __future__ import annotations

import asyncio

import pytest
from penstock.common.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from penstock.router.backends.attempts import RetryBudget
from penstock.router.frontend.admission import Admission


def admission(max_live: int = 1, max_waiting: int = 2) -> Admission:
    return Admission(max_live=max_live, max_waiting=max_waiting, retry_after_seconds=0.5)


async def settle() -> None:
    """Let tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_waits_for_a_place_and_gets_it() -> None:
    gate = admission()
    await gate.enter("t", None)
    second = asyncio.ensure_future(gate.enter("t", None))
    await settle()
    assert (gate.live, gate.waiting, second.done()) == (1, 1, False)
    gate.leave()
    await second
    assert (gate.live, gate.waiting) == (1, 0)


async def test_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    gate = admission(max_waiting=0)
    await gate.enter("t", None)
    with pytest.raises(ResourceExhausted) as caught:
        await gate.enter("t", None)
    assert (caught.value.reason, caught.value.retry_after_seconds) == ("QUEUE_FULL", 0.5)


async def test_deadline_that_passed_is_refused_and_one_that_passes_ends_the_wait() -> None:
    gate = admission()
    with pytest.raises(DeadlineExceeded):
        await gate.enter("t", 0)
    await gate.enter("t", 1)
    with pytest.raises(DeadlineExceeded):
        await gate.enter("t", 0.01)
    assert (gate.live, gate.waiting) == (1, 0)


async def test_cancelled_waiters_leave_nothing_behind() -> None:
    gate = admission()
    await gate.enter("t", None)
    waiter = asyncio.ensure_future(gate.enter("t", None))
    await settle()
    gate.leave()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert (gate.live, gate.waiting) == (0, 0)
    await gate.wait_until_empty()


async def test_tenants_are_let_in_in_turn() -> None:
    gate = admission(max_waiting=10)
    await gate.enter("flood", None)
    order: list[str] = []

    async def one(tenant: str) -> None:
        await gate.enter(tenant, None)
        order.append(tenant)
        gate.leave()

    tasks = [asyncio.ensure_future(one("flood")) for _ in range(5)]
    await settle()
    tasks.append(asyncio.ensure_future(one("small")))
    await settle()
    gate.leave()
    await asyncio.gather(*tasks)
    assert order.index("small") <= 1


async def test_flood_cannot_fill_the_queue_against_others() -> None:
    gate = admission(max_waiting=3)
    await gate.enter("flood", None)
    flood = [asyncio.ensure_future(gate.enter("flood", None)) for _ in range(3)]
    await settle()
    small = asyncio.ensure_future(gate.enter("small", None))
    await settle()
    assert not small.done()
    with pytest.raises(ResourceExhausted):
        await flood[-1]
    with pytest.raises(ResourceExhausted):
        await gate.enter("flood", None)
    for task in (*flood[:-1], small):
        task.cancel()
    await asyncio.gather(*flood, small, return_exceptions=True)


async def test_draining_refuses() -> None:
    gate = admission()
    gate.drain()
    with pytest.raises(Unavailable) as caught:
        await gate.enter("t", None)
    assert caught.value.reason == "DRAINING"


def test_retries_are_a_share_of_requests_after_the_burst() -> None:
    budget = RetryBudget(ratio=0.1, burst=2)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(10):
        budget.note_request()
    assert [budget.take() for _ in range(2)] == [True, False]
