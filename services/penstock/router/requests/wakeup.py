"""A wake-up call for one waiting coroutine: cheaper than asyncio.Event, which the per-token path would feel."""

from __future__ import annotations

import asyncio


class Wakeup:
    """`set` from the event loop; one coroutine waits at a time."""

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
