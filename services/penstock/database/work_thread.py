"""Thread of a database: its calls block, and run one after the other beside the event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from penstock.database.transactions import DatabaseFailed

T = TypeVar("T")


class WorkThread:
    """One thread, which begins with its first work. The process does not wait for it at its end: a server that says
    nothing may hold it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._end = weakref.finalize(self, self._waiting.put, None)
        self._has_begun = False

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns on the thread. Raises DatabaseFailed after `close`, and what `work` raises."""
        if not self._end.alive:
            raise DatabaseFailed("it is closed")
        future: Future[T] = Future()
        self._waiting.put(lambda: _fulfil(future, work))
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=_work, args=(self._waiting,), name=self._name, daemon=True).start()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Take no more work. What came before is still done. A second call does nothing."""
        self._end()


def _work(waiting: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := waiting.get()) is not None:
        work()
        # What it holds is free while the thread waits.
        del work


def _fulfil(future: Future[Any], work: Callable[[], Any]) -> None:
    """Do the work unless its caller has left."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
        # Its traceback leads back to the future.
        del future
    else:
        future.set_result(result)
