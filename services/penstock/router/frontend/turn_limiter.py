"""Sharing of the event loop between writing to clients and reading from backends and tokenizer."""

from __future__ import annotations

import asyncio
from collections import deque


class TurnLimiter:
    """Lets at most `per_turn` coroutines pass in one turn of the event loop, first come first served.

    Without it, a step of many streams fills whole turns with writes, and only one step is read per turn. Under load the
    backlog then grows unseen in the connection to the backend. With it reading continues, waiting deltas are merged,
    and the same work takes fewer messages. A stuck write holds no place.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def enter(self) -> None:
        """Wait for the caller's turn, which comes at once unless the loop is busy."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._next_turn)
        if self._left > 0:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _next_turn(self) -> None:
        self._left = self._per_turn
        while self._waiting and self._left > 0:
            place = self._waiting.popleft()
            if not place.done():
                self._left -= 1
                place.set_result(None)
        self._is_scheduled = bool(self._waiting) or self._left < self._per_turn
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._next_turn)
