"""Bounded outgoing side of one stream. Used from one event loop only, so there are no locks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from penstock.common.errors import PenstockError, ResourceExhausted

M = TypeVar("M")


class Outbox(Generic[M]):
    """Messages that wait for a stream's reader. Past `bound` the reader is cut off and nothing more is kept."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._messages: deque[M] = deque()
        self._wakeup = asyncio.Event()
        self._closed = False
        self._overflowed = False
        self._error: PenstockError | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._closed

    @property
    def overflowed(self) -> bool:
        """Whether the reader was cut off."""
        return self._overflowed

    def put(self, message: M) -> bool:
        """Queue a message; False when the stream is closed, also by this very message being one too many."""
        if self._closed:
            return False
        if len(self._messages) >= self._bound:
            self._messages.clear()
            self._overflowed = True
            self.close(
                ResourceExhausted(f"the reader is more than {self._bound} messages behind", reason="SLOW_READER")
            )
            return False
        self._messages.append(message)
        self._wakeup.set()
        return True

    def close(self, error: PenstockError | None = None) -> None:
        """End the stream after what is queued: with OK, or with `error`. The first call counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._wakeup.set()

    async def __aiter__(self) -> AsyncIterator[M]:
        """Yield queued messages as they come. Raises the closing error after the last one."""
        while True:
            while self._messages:
                yield self._messages.popleft()
            if self._closed:
                break
            self._wakeup.clear()
            await self._wakeup.wait()
        if self._error is not None:
            raise self._error
