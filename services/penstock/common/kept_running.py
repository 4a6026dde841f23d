"""Work beside requests that goes on after a fault of its own, which the log tells at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


async def kept_running(
    work: Callable[[], Awaitable[None]], log: FilteringBoundLogger, name: str, pause_seconds: float
) -> None:
    """Await `work` until it returns, or this is cancelled; after each fault begin it anew, `pause_seconds` later.

    `log` gets each fault with its traceback and `name`. Faults that are expected, such as a peer that is away, are the
    work's own matter.
    """
    while True:
        try:
            return await work()
        except Exception:
            log.exception("work in the background failed, and begins anew", work=name)
        await asyncio.sleep(pause_seconds)
