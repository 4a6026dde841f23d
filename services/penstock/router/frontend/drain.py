"""End of a drain's grace: calls that still run end with a last message before the server cuts them off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from penstock.common.errors import Aborted, PenstockError, Unavailable
from penstock.router.requests.request_state import RequestState
from penstock.serving.server import STOP_GRACE_SECONDS

# Seconds for a reader to take its Finished. The status after it has the rest of the server's own grace.
LAST_WORD_SECONDS = STOP_GRACE_SECONDS / 2


def grace_over(kind: type[PenstockError] = Aborted) -> PenstockError:
    """Make the error in the generation service's words: Unavailable for a call without output, else Aborted."""
    return kind("the process stops and its grace is over", reason="DRAIN_GRACE_OVER")


@dataclass(slots=True, eq=False)
class GraceEnd:
    """End of one call when the grace is over."""

    limit: asyncio.Timeout
    # Set once the call is a stream that can end itself.
    state: RequestState | None = None
    # Raised when the call's handler is cut off.
    error: Callable[[], PenstockError] = field(default=partial(grace_over, Unavailable))

    def end_call(self) -> None:
        """End the call: a stream with Finished, unless its reader is stuck; anything else at once."""
        now = asyncio.get_running_loop().time()
        if self.state is None:
            self.limit.reschedule(now)
            return
        self.state.fail(grace_over())
        self.limit.reschedule(now + LAST_WORD_SECONDS)


class Drain:
    """Calls that run now. Belongs to one event loop."""

    def __init__(self) -> None:
        self._calls: set[GraceEnd] = set()

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[GraceEnd]:
        """Register a call while it runs. Raises the error of its GraceEnd if it was cut off."""
        grace_end = GraceEnd(asyncio.timeout(None))
        self._calls.add(grace_end)
        try:
            async with grace_end.limit:
                yield grace_end
        except TimeoutError:
            if grace_end.limit.expired():
                raise grace_end.error() from None
            raise
        finally:
            self._calls.discard(grace_end)

    def end_grace(self) -> None:
        """End every call: the grace is over."""
        calls, self._calls = self._calls, set()
        for call in calls:
            call.end_call()
