"""The end of a connection: the first of several streams to end, or silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

# A timeout is counted in this many looks, so that a stop of this process itself is not taken for the peer's silence.
_LOOKS = 8


async def until_first(*work: Coroutine[None, None, None]) -> None:
    """Run together until the first ends; the others are cancelled. Raises what the first raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def until_silent(seconds: float, signs: Callable[[], int], is_due: Callable[[], bool]) -> None:
    """Return once `signs` (a count of signs of life) stood still for `seconds` during which something was due."""
    quiet = 0
    while quiet < _LOOKS:
        before = signs()
        await asyncio.sleep(seconds / _LOOKS)
        quiet = quiet + 1 if is_due() and signs() == before else 0
