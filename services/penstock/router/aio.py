"""Waits: for the first of several coroutines to end, for silence, and for a wake-up from a callback."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine

# Least number of checks that a timeout takes, so that a pause of this process itself is not taken for the peer's
# silence; and the longest time between checks, which adds to the time until silence is noticed.
_LOOKS, _LONGEST_LOOK_SECONDS = 16, 0.5


async def until_first(*work: Coroutine[None, None, None]) -> None:
    """Run all together until the first ends, and cancel the others. Raises the first one's error."""
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
    """Return once `signs` (a count of signs of life) has stood still for `seconds` during which something was due."""
    quiet, looks = 0, max(_LOOKS, math.ceil(seconds / _LONGEST_LOOK_SECONDS))
    while quiet < looks:
        before = signs()
        await asyncio.sleep(seconds / looks)
        quiet = quiet + 1 if is_due() and signs() == before else 0


def is_cancelled() -> bool:
    """True when the current task itself was cancelled, not only the call that it awaits, as grpc.aio does."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class Wakeup:
    """Wake-up call for one waiting coroutine, cheaper than asyncio.Event: it is on the per-token path.

    `set` from the event loop; one coroutine waits at a time.
    """

    __slots__ = ("_is_set", "_loop", "_waiter")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_set = False

    def set(self) -> None:
        """Wake the waiter, or let the next `wait` return at once."""
        self._is_set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Return once `set` was called since the last `wait` returned."""
        if not self._is_set:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False
