"""Log lines for errors in an event loop that nobody awaits: one each, but only an occasional one when out of
descriptors."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import Any

from penstock.common.logging import get_logger

# Shortest time between two log lines about connections that wait.
_LOG_SECONDS = 10.0
# Errors of accept() when a process or the machine has no descriptors or memory left.
LACKS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_log = get_logger("penstock.server")


class LoopErrors:
    """Exception handler of one event loop.

    Without free descriptors, asyncio's own servers (the health socket) try to accept a backlog's worth of connections
    every second, and report each failure.
    """

    def __init__(self) -> None:
        """Make it, for `loop.set_exception_handler`."""
        self._told_at = -_LOG_SECONDS

    def __call__(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log `context` without its text, which may quote callers."""
        error = context.get("exception")
        if "socket" in context and isinstance(error, OSError) and error.errno in LACKS:
            now = time.monotonic()
            if now - self._told_at >= _LOG_SECONDS:
                self._told_at = now
                _log.warning("connections wait: they cannot be accepted", cause=error.strerror, hint="raise ulimit -n")
            return
        if isinstance(error, ValueError) and _begins_to_serve(context.get("handle")):
            # The server was closed while it waited to accept again.
            return
        _log.error("unhandled error in the event loop", exc_info=error)


def _begins_to_serve(handle: object) -> bool:
    """True for asyncio's call that lets a server accept again, a second after it ran out of descriptors."""
    return getattr(getattr(handle, "_callback", None), "__name__", "") == "_start_serving"
