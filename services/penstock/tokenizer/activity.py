"""What is going on, so that a drain knows when it is over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Activity:
    """Counts calls at work and live sequences. Used on the event loop only."""

    def __init__(self) -> None:
        self._live = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around the work of one call."""
        self.add(1)
        try:
            yield
        finally:
            self.add(-1)

    def add(self, change: int) -> None:
        """More or fewer live things."""
        self._live += change
        if self._live:
            self._idle.clear()
        else:
            self._idle.set()

    async def drain(self) -> None:
        """Have new calls refused; return when nothing is live. Open DecodeStreams may go on until then."""
        self.draining = True
        await self._idle.wait()
