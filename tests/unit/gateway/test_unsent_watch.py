"""A reader that takes some of what waits keeps its connection for long; one that takes little loses it."""

from __future__ import annotations

import asyncio

import pytest
from penstock.gateway.unsent_watch import UnsentWatch

SECONDS = 0.001


@pytest.mark.parametrize(
    ("waiting", "looks"),
    [
        # Nothing is taken.
        ([10 << 20, 10 << 20], 1),
        # An eighth in each period, and then less.
        ([8 << 20, 7 << 20, 6 << 20, 5 << 20, (4 << 20) + 1], 4),
        # All of it, and then the other end does not close.
        ([100 << 10, 0, 0], 2),
        # Fewer bytes than a slow line brings in a period.
        ([100 << 10, 90 << 10], 1),
    ],
)
async def test_it_gives_up_once_a_period_has_taken_too_little(waiting: list[int], looks: int) -> None:
    left, given_up = iter(waiting), asyncio.Event()
    seen: list[int] = []

    def look() -> int:
        seen.append(next(left))
        return seen[-1]

    UnsentWatch(asyncio.get_running_loop()).begin(SECONDS, look, given_up.set)
    async with asyncio.timeout(30):
        await given_up.wait()
    assert len(seen) - 1 == looks


async def test_one_that_has_ended_looks_no_more() -> None:
    loop, seen = asyncio.get_running_loop(), []

    def look() -> int:
        seen.append(1)
        return 0

    watch = UnsentWatch(loop)
    watch.begin(SECONDS, look, lambda: seen.append(2))
    watch.end()
    watch.end()
    await asyncio.sleep(10 * SECONDS)
    assert seen == [1]
