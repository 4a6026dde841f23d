"""Wait of new requests for a model, or an adapter, that was there until a moment ago: its last backend is restarted."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig


class ReturnWait:
    """Lets requests wait where the last backend that could take them went a moment ago. Belongs to one event loop.

    In a rolling restart the next backend is stopped as soon as the last one serves again, and the router may not be
    connected to that one yet. Who waits holds a place of admission, so that the waiting ones are bounded.
    """

    def __init__(self, pool: BackendPool, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._config = config
        self._clock = clock

    def is_awaited(self, model: str, adapter: str = "") -> bool:
        """True while no ready backend has a model and an adapter, and requests wait for one."""
        return self._left(model, adapter) > 0

    async def end(self, model: str, adapter: str, timeout: float | None) -> None:
        """Return once a ready backend has both, or none is awaited any more, or after `timeout` seconds."""
        until = None if timeout is None else self._clock() + timeout
        while (left := self._left(model, adapter)) > 0:
            if until is not None:
                left = min(left, until - self._clock())
                if left <= 0:
                    return
            await self._pool.changed(left)

    def _left(self, model: str, adapter: str) -> float:
        # An adapter that another backend may load is not waited for.
        if self._pool.ready(model, "" if self._config.adapter_loading else adapter):
            return 0.0
        since = self._pool.absences.since(model, adapter)
        return 0.0 if since is None else since + self._config.return_wait_seconds - self._clock()
