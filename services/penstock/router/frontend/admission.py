"""Admission of requests: bounds on the live and on the waiting ones, fair between tenants.

Waiting requests are let in one per tenant in turn. When the queue is full the tenant with the most waiting requests
loses its newest one, so that one tenant's flood cannot shut out another.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from penstock.common.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from penstock.router.config import RouterConfig

DEFAULT_TENANT = "default"


def tenant_of(config: RouterConfig, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Hash of the caller's credentials; a constant where no authentication is needed."""
    if config.auth_token_file is None:
        return DEFAULT_TENANT
    return hashlib.sha256(str(dict(metadata or ()).get("authorization", "")).encode()).hexdigest()


class Admission:
    """Places for live requests, and the queue of those that wait. Belongs to one event loop."""

    def __init__(self, *, max_live: int, max_waiting: int, retry_after_seconds: float) -> None:
        self._max_live = max_live
        self._max_waiting = max_waiting
        self._retry_after = retry_after_seconds
        self._live = 0
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def live(self) -> int:
        """Number of requests that were let in and are not done."""
        return self._live

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return sum(len(queue) for queue in self._queues.values())

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    async def wait_until_empty(self) -> None:
        """Return when no request is live or waiting."""
        await self._empty.wait()

    async def enter(self, tenant: str, timeout: float | None) -> None:
        """Wait for a place; the caller must `leave` once it returned.

        Raises Unavailable (DRAINING), ResourceExhausted (QUEUE_FULL) at once, DeadlineExceeded after `timeout` s.
        """
        if self._draining:
            raise Unavailable("the router is draining", reason="DRAINING", retry_after_seconds=self._retry_after)
        if timeout is not None and timeout <= 0:
            raise _expired()
        if self._live < self._max_live and not self._queues:
            self._take()
            return
        if self.waiting >= self._max_waiting:
            self._shed(tenant)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(place)
        self._empty.clear()
        entered = False
        try:
            async with asyncio.timeout(timeout):
                await place
            entered = True
        except TimeoutError:
            raise _expired() from None
        finally:
            if not entered and place.done() and not place.cancelled() and place.exception() is None:
                # It was let in and cancelled in the same turn of the loop.
                self.leave()
            self._forget(tenant, place)

    def leave(self) -> None:
        """Give the place back, and let the next one in."""
        self._live -= 1
        while self._queues and self._live < self._max_live:
            tenant, queue = next(iter(self._queues.items()))
            place = queue.popleft()
            self._queues.move_to_end(tenant)
            if not queue:
                del self._queues[tenant]
            if not place.done():
                self._take()
                place.set_result(None)
        self._note_empty()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Give the place back at the end of the block."""
        try:
            yield
        finally:
            self.leave()

    def _take(self) -> None:
        self._live += 1
        self._empty.clear()

    def _shed(self, tenant: str) -> None:
        """Make room for `tenant` by refusing a request of a tenant that has more waiting, or refuse this one."""
        largest, queue = max(self._queues.items(), key=lambda item: len(item[1]), default=(tenant, deque()))
        if len(queue) <= len(self._queues.get(tenant, ())) + 1:
            raise self._full()
        place = queue.pop()
        if not queue:
            del self._queues[largest]
        if not place.done():
            place.set_exception(self._full())

    def _full(self) -> ResourceExhausted:
        return ResourceExhausted(
            f"more than {self._max_live} requests live and {self._max_waiting} waiting",
            reason="QUEUE_FULL",
            retry_after_seconds=self._retry_after,
        )

    def _forget(self, tenant: str, place: asyncio.Future[None]) -> None:
        queue = self._queues.get(tenant)
        if queue is not None and place in queue:
            queue.remove(place)
            if not queue:
                del self._queues[tenant]
        self._note_empty()

    def _note_empty(self) -> None:
        if self._live == 0 and not self._queues:
            self._empty.set()


def _expired() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed before the request was admitted", reason="DEADLINE_EXCEEDED")
