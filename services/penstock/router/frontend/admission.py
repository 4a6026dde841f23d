"""Admission of requests: limits on live and on waiting ones, fair between tenants.

Requests of idle capacity are a tenant of their own, which comes after all others and makes room first.
Waiting requests are admitted by tokens: the tenant that has received the fewest comes first. When the queue is full,
the tenant with the most waiting requests loses its newest one, so one tenant's flood cannot shut out another.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.common.credentials import bearer_token, secret_digest
from penstock.common.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from penstock.common.fair_order import FairOrder
from penstock.common.idle_only import IDLE_TENANT, asks_for_idle_only
from penstock.router.config import RouterConfig

DEFAULT_TENANT = "default"


def tenant_of(config: RouterConfig, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Hash of the caller's token, which may be any text; a constant when no authentication is needed.

    Callers with a key of --keys-file have their key's tenant instead.
    """
    if config.auth_token_file is None:
        return DEFAULT_TENANT
    token = bearer_token(dict(metadata or ()).get("authorization"))
    return secret_digest(token or b"").hex()


def serving_tenant(tenant: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the tenant of a call's places and turns: the caller's own, or the one of all idle capacity.

    Caches and sessions stay the caller's own.
    """
    return IDLE_TENANT if asks_for_idle_only(metadata) else tenant


def fair_share_key(tenant: str) -> str:
    """Key by which backends serve tenants fairly; it reveals nothing about the tenant. Empty for the only tenant."""
    if tenant == IDLE_TENANT:
        return tenant
    return "" if tenant == DEFAULT_TENANT else hashlib.sha256(f"fair share:{tenant}".encode()).hexdigest()[:16]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for a place."""

    place: asyncio.Future[None]
    tokens: float


class Admission:
    """Places for live requests, and the queue of waiting ones. Belongs to one event loop."""

    def __init__(
        self,
        *,
        max_live: int,
        max_waiting: int,
        retry_after_seconds: float,
        tenant_share: float = 1.0,
        idle_share: float = 0.25,
    ) -> None:
        """Make it. `tenant_share`: share of the places that one tenant may have, if tenants are told apart.

        `idle_share`: share of the places that all requests of idle capacity may have.
        """
        self._max_live = max_live
        self._max_waiting = max_waiting
        self._retry_after = retry_after_seconds
        self._max_of_tenant = max(1, int(tenant_share * max_live))
        self._max_of_idle = max(1, int(idle_share * max_live))
        self._live = 0
        self._live_of: Counter[str] = Counter()
        self._queues: dict[str, deque[_Waiting]] = {}
        self._order = FairOrder()
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def live(self) -> int:
        """Number of requests that were admitted and are not done."""
        return self._live

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return sum(len(queue) for queue in self._queues.values())

    @property
    def pressing(self) -> int:
        """Number of requests, admitted or in the queue, that use more than idle capacity."""
        return self._live - self._live_of[IDLE_TENANT] + self.waiting - len(self._queues.get(IDLE_TENANT, ()))

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    async def wait_until_empty(self) -> None:
        """Return when no request is live or waiting."""
        await self._empty.wait()

    async def enter(self, tenant: str, timeout: float | None, tokens: float = 1.0) -> None:
        """Wait for a place; the caller must `leave` after this returned. `tokens`: expected tokens of prompt and
        output.

        Raises Unavailable (DRAINING), ResourceExhausted (QUEUE_FULL) at once, DeadlineExceeded after `timeout` s.
        """
        if self._draining:
            raise Unavailable("the router is draining", reason="DRAINING", retry_after_seconds=self._retry_after)
        if timeout is not None and timeout <= 0:
            raise _expired()
        # While there is a free place, all waiting tenants have their share already.
        if self._live < self._max_live and self._may_take(tenant):
            self._take(tenant)
            return
        if self.waiting >= self._max_waiting:
            self._shed(tenant)
        waiting = _Waiting(asyncio.get_running_loop().create_future(), tokens)
        self._queues.setdefault(tenant, deque()).append(waiting)
        self._order.wait(tenant)
        self._empty.clear()
        place, entered = waiting.place, False
        try:
            async with asyncio.timeout(timeout):
                await place
            entered = True
        except TimeoutError:
            raise _expired() from None
        finally:
            if not entered and place.done() and not place.cancelled() and place.exception() is None:
                # It was admitted and cancelled in the same turn of the loop.
                self.leave(tenant)
            self._forget(tenant, waiting)

    def leave(self, tenant: str) -> None:
        """Give back a tenant's place, and admit the next requests."""
        self._live -= 1
        self._live_of[tenant] -= 1
        if not self._live_of[tenant]:
            del self._live_of[tenant]
            if tenant not in self._queues:
                self._order.forget(tenant)
        while self._live < self._max_live:
            following = next((one for one in self._in_turn() if self._may_take(one)), None)
            if following is None:
                break
            waiting = self._queues[following].popleft()
            if not waiting.place.done():
                self._order.charge(following, waiting.tokens)
                self._take(following)
                waiting.place.set_result(None)
            self._drop_if_empty(following)
        self._note_empty()

    @contextmanager
    def leaving(self, tenant: str) -> Iterator[None]:
        """Give back a tenant's place at the end of the block."""
        try:
            yield
        finally:
            self.leave(tenant)

    def _in_turn(self) -> Iterator[str]:
        """Iterate over the waiting tenants; that of idle capacity comes after all others."""
        yield from (tenant for tenant in self._order if tenant != IDLE_TENANT)
        if IDLE_TENANT in self._queues:
            yield IDLE_TENANT

    def _may_take(self, tenant: str) -> bool:
        if tenant == IDLE_TENANT:
            return self._live_of[tenant] < self._max_of_idle
        return tenant == DEFAULT_TENANT or self._live_of[tenant] < self._max_of_tenant

    def _take(self, tenant: str) -> None:
        self._live += 1
        self._live_of[tenant] += 1
        self._empty.clear()

    def _shed(self, tenant: str) -> None:
        """Make room for `tenant`: refuse a request of a tenant with more waiting, or this one."""
        idle = self._queues.get(IDLE_TENANT)
        if tenant == IDLE_TENANT:
            raise self._full()
        if idle:
            largest, queue = IDLE_TENANT, idle
        else:
            largest, queue = max(self._queues.items(), key=lambda item: len(item[1]), default=(tenant, deque()))
            if len(queue) <= len(self._queues.get(tenant, ())) + 1:
                raise self._full()
        place = queue.pop().place
        self._drop_if_empty(largest)
        if not place.done():
            place.set_exception(self._full())

    def _full(self) -> ResourceExhausted:
        return ResourceExhausted(
            f"more than {self._max_live} requests live and {self._max_waiting} waiting",
            reason="QUEUE_FULL",
            retry_after_seconds=self._retry_after,
        )

    def _forget(self, tenant: str, waiting: _Waiting) -> None:
        queue = self._queues.get(tenant)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            self._drop_if_empty(tenant)
        self._note_empty()

    def _drop_if_empty(self, tenant: str) -> None:
        if self._queues[tenant]:
            return
        del self._queues[tenant]
        if tenant in self._live_of:
            # Its tokens count while it holds places: else it would start at zero whenever its queue is empty.
            self._order.stop_waiting(tenant)
        else:
            self._order.forget(tenant)

    def _note_empty(self) -> None:
        if self._live == 0 and not self._queues:
            self._empty.set()


def _expired() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed before the request was admitted", reason="DEADLINE_EXCEEDED")
