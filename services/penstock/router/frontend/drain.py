"""What calls hear that still live when the drain's grace is over: their own last word, before the server cuts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from penstock.common.errors import Aborted, PenstockError, Unavailable
from penstock.router.requests.request_state import LiveRequest
from penstock.serving.server import STOP_GRACE_SECONDS

# What readers have to take their Finished. The status of those who do not has the rest of the server's own grace.
LAST_WORD_SECONDS = STOP_GRACE_SECONDS / 2


def grace_over(kind: type[PenstockError] = Aborted) -> PenstockError:
    """As the generation service says it: Unavailable to who has had no output, Aborted to who has."""
    return kind("the process stops and its grace is over", reason="DRAIN_GRACE_OVER")


@dataclass(slots=True, eq=False)
class Leave:
    """One call's."""

    limit: asyncio.Timeout
    # Set once it is a stream that can end by itself.
    live: LiveRequest | None = None
    # What it hears when its handler is cut off.
    error: Callable[[], PenstockError] = field(default=partial(grace_over, Unavailable))

    def take(self) -> None:
        """End the call: a stream by Finished, unless its reader is stuck, anything else at once."""
        now = asyncio.get_running_loop().time()
        if self.live is None:
            self.limit.reschedule(now)
            return
        self.live.fail(grace_over())
        self.limit.reschedule(now + LAST_WORD_SECONDS)


class Farewell:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._leaves: set[Leave] = set()

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[Leave]:
        """Around a call's work. Raises the leave's error when the work was cut off."""
        leave = Leave(asyncio.timeout(None))
        self._leaves.add(leave)
        try:
            async with leave.limit:
                yield leave
        except TimeoutError:
            if leave.limit.expired():
                raise leave.error() from None
            raise
        finally:
            self._leaves.discard(leave)

    def say(self) -> None:
        """The grace is over."""
        leaves, self._leaves = self._leaves, set()
        for leave in leaves:
            leave.take()
