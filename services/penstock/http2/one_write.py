"""Bytes for several connections that leave at the end of what the event loop does now, not in its next turn.

A turn costs a system call and a look at all that is ready: where each message brings one token, several percent of what
a router does for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class _DueFlushes(threading.local):
    """Flushes for the end of the work; None: there is no such end. Each thread has an event loop of its own."""

    flushes: list[Callable[[], None]] | None = None


waiting = _DueFlushes()


def flushed_together(work: Callable[[], None]) -> None:
    """Call `work`, and then what was appended to `waiting.flushes` meanwhile, in a running event loop. Raises as
    `work`."""
    if waiting.flushes is not None:
        work()
        return
    flushes = waiting.flushes = []
    try:
        work()
    finally:
        waiting.flushes = None
        for flush in flushes:
            try:
                flush()
            except Exception as error:
                # It is no fault of `work`, nor of the other connections.
                told = {"message": "bytes could not be written to a connection", "exception": error}
                asyncio.get_running_loop().call_exception_handler(told)
