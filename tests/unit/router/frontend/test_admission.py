"""Admission: bounds, order, fairness between tenants, and nothing leaked whatever is cancelled when."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from penstock.common.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from penstock.common.idle_only import IDLE_ONLY_KEY, IDLE_TENANT
from penstock.router.backends.attempts import RetryBudget
from penstock.router.config import RouterConfig
from penstock.router.frontend.admission import DEFAULT_TENANT, Admission, fair_share_key, serving_tenant, tenant_of


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
    gate.leave("t")
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
    gate.leave("t")
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
        gate.leave(tenant)

    tasks = [asyncio.ensure_future(one("flood")) for _ in range(5)]
    await settle()
    tasks.append(asyncio.ensure_future(one("small")))
    await settle()
    gate.leave("flood")
    await asyncio.gather(*tasks)
    assert order.index("small") <= 1


async def test_turns_are_by_tokens() -> None:
    gate = admission(max_waiting=20)
    await gate.enter("other", None)
    order: list[str] = []

    async def one(tenant: str, tokens: float) -> None:
        await gate.enter(tenant, None, tokens)
        order.append(tenant)
        gate.leave(tenant)

    tasks = [asyncio.ensure_future(one("long", 100.0)) for _ in range(3)]
    tasks += [asyncio.ensure_future(one("short", 25.0)) for _ in range(8)]
    await settle()
    gate.leave("other")
    await asyncio.gather(*tasks)
    assert order[:10].count("short") == 8


async def test_a_tenant_that_never_has_two_waiting_takes_no_turn_of_the_others() -> None:
    gate = admission(max_waiting=10)
    await gate.enter("other", None)
    order = ["other"]
    waiting: list[asyncio.Future[None]] = []

    async def one(tenant: str) -> None:
        await gate.enter(tenant, None, 10.0)
        order.append(tenant)
        if tenant == "one by one":
            # Its next request waits before this one ends, always.
            waiting.append(asyncio.ensure_future(one(tenant)))

    waiting.append(asyncio.ensure_future(one("one by one")))
    waiting += [asyncio.ensure_future(one("flood")) for _ in range(8)]
    for _ in range(8):
        await settle()
        gate.leave(order[-1])
    await settle()
    assert order[1:].count("flood") == 4, order
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_nothing_is_kept_of_a_tenant_that_is_gone() -> None:
    gate = admission(max_waiting=10)
    await gate.enter("a", None)
    entered = [asyncio.ensure_future(gate.enter(name, None)) for name in "bcb"]
    await settle()
    for name in "abcb":
        gate.leave(name)
        await settle()
    await asyncio.gather(*entered)
    assert (gate.live, gate.waiting, len(gate._order._accounts)) == (0, 0, 0)


def test_a_tenant_is_its_token_however_that_is_spelt(tmp_path: Path) -> None:
    config = RouterConfig(auth_token_file=str(tmp_path / "tokens"))
    spelt = ["Bearer one", "bearer one", "BEARER one", "Bearer  one", "Bearer    one "]
    assert len({tenant_of(config, (("authorization", one),)) for one in spelt}) == 1
    assert len({tenant_of(config, (("authorization", one),)) for one in (spelt[0], "Bearer two")}) == 2


async def test_a_tenant_has_its_share_of_the_places_and_no_more() -> None:
    gate = Admission(max_live=4, max_waiting=8, retry_after_seconds=0.5, tenant_share=0.75)
    flood = [asyncio.ensure_future(gate.enter("flood", None)) for _ in range(5)]
    await settle()
    assert (gate.live, gate.waiting) == (3, 2)
    await gate.enter("small", None)
    gate.leave("small")
    await settle()
    assert (gate.live, gate.waiting) == (3, 2)
    gate.leave("flood")
    await settle()
    assert (gate.live, gate.waiting) == (3, 1)
    flood[-1].cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    # Where tenants are not told apart the only one has all of them.
    alone = Admission(max_live=4, max_waiting=8, retry_after_seconds=0.5, tenant_share=0.75)
    for _ in range(4):
        await alone.enter(DEFAULT_TENANT, None)
    assert alone.live == 4


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


async def test_idle_capacity_comes_after_all_others_and_has_its_share_of_places() -> None:
    gate = Admission(max_live=4, max_waiting=10, retry_after_seconds=0.5, idle_share=0.5)
    order: list[str] = []

    async def one(tenant: str) -> None:
        await gate.enter(tenant, None)
        order.append(tenant)

    for _ in range(2):
        await gate.enter(IDLE_TENANT, None)
    tasks = [asyncio.ensure_future(one(IDLE_TENANT)) for _ in range(2)]
    await settle()
    # Half of the places is the most, while others are free.
    assert (gate.live, gate.waiting) == (2, 2)
    for _ in range(2):
        await gate.enter("t", None)
    tasks.append(asyncio.ensure_future(one("t")))
    await settle()
    gate.leave(IDLE_TENANT)
    await settle()
    assert order == ["t"]
    for _ in range(3):
        gate.leave("t")
    await settle()
    assert order == ["t", IDLE_TENANT]
    gate.leave(IDLE_TENANT)
    await asyncio.gather(*tasks)


async def test_idle_capacity_makes_room_in_a_full_queue_and_never_takes_it() -> None:
    gate = admission(max_live=1, max_waiting=1)
    await gate.enter("t", None)
    waiting = asyncio.ensure_future(gate.enter(IDLE_TENANT, None))
    await settle()
    other = asyncio.ensure_future(gate.enter("t", None))
    with pytest.raises(ResourceExhausted):
        await waiting
    with pytest.raises(ResourceExhausted):
        await gate.enter(IDLE_TENANT, None)
    gate.leave("t")
    await other


def test_idle_capacity_is_a_tenant_of_its_own_that_metadata_asks_for() -> None:
    asked = [("authorization", "Bearer a"), (IDLE_ONLY_KEY, "1")]
    assert serving_tenant("mine", asked) == IDLE_TENANT
    assert serving_tenant("mine", asked[:1]) == "mine"
    assert fair_share_key(IDLE_TENANT) == IDLE_TENANT
    # Prefixes stay the caller's own.
    assert tenant_of(RouterConfig(), asked) == DEFAULT_TENANT
