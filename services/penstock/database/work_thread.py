"""Thread of a database: its calls block, and run one after the other beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.database.transactions import DatabaseFailed

T = TypeVar("T")


class WorkThread:
    """One thread, which begins with its first work."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns on the thread. Raises DatabaseFailed after `close`, and what `work` raises."""
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        except RuntimeError as error:
            raise DatabaseFailed("it is closed") from error
        return await running

    def close(self) -> None:
        """Take no more work. What came before is still done. A second call does nothing."""
        self._pool.shutdown(wait=False)
