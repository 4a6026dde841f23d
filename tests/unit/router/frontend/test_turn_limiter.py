"""Turn limiter: so many a turn, in order, and no coroutine is forgotten."""

from __future__ import annotations

import asyncio

from penstock.router.frontend.turn_limiter import TurnLimiter


async def test_no_more_than_the_limit_pass_in_one_turn() -> None:
    gate, passed = TurnLimiter(3), []

    async def one(number: int) -> None:
        await gate.enter()
        passed.append(number)

    tasks = [asyncio.ensure_future(one(number)) for number in range(8)]
    counts = []
    while len(passed) < 8:
        before = len(passed)
        await asyncio.sleep(0)
        counts.append(len(passed) - before)
    await asyncio.gather(*tasks)
    assert max(counts) == 3
    assert passed == sorted(passed)


async def test_a_cancelled_waiter_does_not_take_a_place() -> None:
    gate = TurnLimiter(1)
    await gate.enter()
    cancelled = asyncio.ensure_future(gate.enter())
    waiting = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0)
    cancelled.cancel()
    await waiting
    await gate.enter()
