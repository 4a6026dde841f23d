"""Answers to strangers: one begins in a turn of the event loop."""

from __future__ import annotations

import asyncio

import pytest
from penstock.gateway.connections import OneATurn


async def _turns(starts: OneATurn, asked: list[tuple[str, bool]]) -> list[list[str]]:
    """Ask for all of them in one turn; return what each turn of the loop called, to the last."""
    seen: list[list[str]] = [[]]
    for name, goes_first in asked:
        starts.call(lambda name=name: seen[-1].append(name), goes_first)  # type: ignore[misc]
    while sum(map(len, seen)) < len(asked):
        seen.append([])
        await asyncio.sleep(0)
    return seen


def test_one_is_called_at_once_and_one_in_each_turn_behind_it() -> None:
    async def run() -> None:
        asked = [(name, False) for name in "abcd"]
        assert await _turns(OneATurn(), asked) == [["a"], ["b"], ["c"], ["d"]]

    asyncio.run(run())


def test_a_probe_is_called_before_those_that_came_earlier() -> None:
    async def run() -> None:
        asked = [("a", False), ("b", False), ("probe", True), ("c", False), ("known", True)]
        assert await _turns(OneATurn(), asked) == [["a"], ["probe"], ["known"], ["b"], ["c"]]

    asyncio.run(run())


def test_after_a_turn_without_any_the_next_is_called_at_once() -> None:
    async def run() -> None:
        starts = OneATurn()
        await _turns(starts, [("a", False), ("b", False)])
        await asyncio.sleep(0)
        assert await _turns(starts, [("c", False)]) == [["c"]]

    asyncio.run(run())


def test_a_callback_that_fails_does_not_hold_up_the_others() -> None:
    async def run() -> None:
        starts, called = OneATurn(), []
        with pytest.raises(ZeroDivisionError):
            starts.call(lambda: 1 // 0, False)  # type: ignore[arg-type]
        starts.call(lambda: called.append("next"), False)
        await asyncio.sleep(0)
        assert called == ["next"]

    asyncio.run(run())
