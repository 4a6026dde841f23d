"""Limits on the requests in progress and on their bodies, by tenant and in total; and the drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.common.errors import Unavailable
from penstock.gateway.http_errors import HttpError

# Tenant of callers that no token tells apart.
ANYBODY = ""


class Places:
    """Limit on requests in progress, and the drain. Belongs to one event loop."""

    def __init__(self, most: int, tenant_share: float, *, shares_anybody: bool = False) -> None:
        """Make it. `tenant_share`: share of the places that one tenant may have, if tokens tell tenants apart.

        `shares_anybody`: callers without a token are one of several tenants.
        """
        self.running = 0
        self.is_draining = False
        # Admitted requests, with complete bodies or not.
        self._inside = 0
        self._shares_anybody = shares_anybody
        self._most = most
        self._most_of_tenant = max(1, int(tenant_share * most))
        self._of_tenant: dict[str, int] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._admitted = _Admitted(self)

    def check_draining(self) -> None:
        """Raises Unavailable during a drain."""
        if self.is_draining:
            raise Unavailable("the gateway is shutting down", reason="DRAINING", retry_after_seconds=1.0)

    def check(self, tenant: str) -> None:
        """Raises HttpError 429 if `tenant` would get no place."""
        if self.running >= self._most:
            raise _full("the limit on requests in progress is reached (--max-requests)")
        if (tenant != ANYBODY or self._shares_anybody) and self._of_tenant.get(tenant, 0) >= self._most_of_tenant:
            raise _full("the limit on requests in progress of this token is reached (--tenant-share of --max-requests)")

    def admitted(self) -> _Admitted:
        """Make a drain wait for the block: an admitted request, from its head on."""
        return self._admitted

    def entered(self, tenant: str) -> _Entered:
        """Hold a place during the block. Raises as `check`."""
        return _Entered(self, tenant)

    def come_in(self) -> None:
        """Begin a block of `admitted`."""
        if not self._inside:
            self._empty.clear()
        self._inside += 1

    def go_out(self) -> None:
        """End a block of `admitted`."""
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    def take(self, tenant: str) -> None:
        """Begin a block of `entered`. Raises as `check`."""
        self.check(tenant)
        self.running += 1
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + 1

    def give_back(self, tenant: str) -> None:
        """End a block of `entered`."""
        self.running -= 1
        if left := self._of_tenant[tenant] - 1:
            self._of_tenant[tenant] = left
        else:
            del self._of_tenant[tenant]

    async def drain(self) -> None:
        """Refuse new requests; return once the admitted ones have ended."""
        self.is_draining = True
        await self._empty.wait()


class _Admitted:
    """Block of `Places.admitted`, the same for all requests: a generator for each would cost four times as much."""

    __slots__ = ("_places",)

    def __init__(self, places: Places) -> None:
        self._places = places

    def __enter__(self) -> None:
        self._places.come_in()

    def __exit__(self, *_: object) -> None:
        self._places.go_out()


class _Entered:
    """Block of `Places.entered`."""

    __slots__ = ("_places", "_tenant")

    def __init__(self, places: Places, tenant: str) -> None:
        self._places, self._tenant = places, tenant

    def __enter__(self) -> None:
        self._places.take(self._tenant)

    def __exit__(self, *_: object) -> None:
        self._places.give_back(self._tenant)


class BodyBytes:
    """Limit on the bytes of all bodies together, from their first byte to the request's end, and on one tenant's.

    When there are too many, an incomplete body gives way, the oldest first: it had the most time.
    """

    def __init__(self, most: int, tenant_share: float = 1.0) -> None:
        """Make it. `tenant_share`: share of the bytes that one tenant may have, except `ANYBODY`."""
        self._most, self._most_of_tenant = most, max(1, int(tenant_share * most))
        self._held = 0
        self._of_tenant: dict[str, int] = {}
        # Incomplete bodies, the oldest first -> callback that gives one up.
        self._coming: dict[Body, Callable[[], None]] = {}

    @property
    def held(self) -> int:
        """Bytes held now."""
        return self._held

    def open(self, give_up: Callable[[], None], tenant: str = ANYBODY) -> Body:
        """Begin a body; `give_up` is called when it must make room."""
        body = Body(self, tenant)
        self._coming[body] = give_up
        return body

    def take(self, body: Body, count: int) -> None:
        """Count bytes of a body. Raises HttpError 429 if all the others are complete, and too many."""
        tenant = body.tenant
        while tenant != ANYBODY and self._of_tenant.get(tenant, 0) + count > self._most_of_tenant:
            # It must make room itself: others are not at fault.
            if not self._make_room(body, tenant):
                raise _full(
                    "the limit on bytes of this token's bodies is reached (--tenant-share of --max-bodies-bytes)"
                )
        while self._held + count > self._most:
            if not self._make_room(body, None):
                raise _full("the limit on bytes of bodies is reached (--max-bodies-bytes)")
        self._held += count
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + count
        body.size += count

    def _make_room(self, body: Body, tenant: str | None) -> bool:
        """Give up the oldest incomplete body but `body`, of a tenant or of all; False: there is none."""
        others = (one for one in self._coming if one is not body and one.size and tenant in (None, one.tenant))
        oldest = next(others, None)
        if oldest is None:
            return False
        give_up = self._coming[oldest]
        oldest.close()
        give_up()
        return True

    def whole(self, body: Body) -> None:
        """Note that a body is complete."""
        self._coming.pop(body, None)

    def close(self, body: Body) -> None:
        """Forget a body and its bytes."""
        self._coming.pop(body, None)
        self._held -= body.size
        if left := self._of_tenant.get(body.tenant, 0) - body.size:
            self._of_tenant[body.tenant] = left
        else:
            self._of_tenant.pop(body.tenant, None)
        body.size = 0


class Body:
    """Bytes of one request's body that count against the limit, until `close` or the end of its block."""

    __slots__ = ("_all", "size", "tenant")

    def __init__(self, all_bodies: BodyBytes, tenant: str) -> None:
        self.size, self.tenant = 0, tenant
        self._all = all_bodies

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        self._all.close(self)

    def take(self, count: int) -> None:
        """Count received bytes. Raises HttpError 429."""
        self._all.take(self, count)

    def whole(self) -> None:
        """Note that the body is complete."""
        self._all.whole(self)

    def moved(self) -> Body:
        """Return a complete body with this one's bytes, which has none then: for work that outlives its request."""
        size = self.size
        self.close()
        found = self._all.open(lambda: None, self.tenant)
        found.whole()
        found.take(size)
        return found

    def close(self) -> None:
        """Give back the bytes. It may be called again."""
        self._all.close(self)


def _full(message: str) -> HttpError:
    return HttpError(429, message, reason="MAX_REQUESTS", retry_after_seconds=1.0)
