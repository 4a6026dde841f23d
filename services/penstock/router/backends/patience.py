"""Patience of a request that lost its backend, while no other is there."""

from __future__ import annotations

import time

from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig
from penstock.router.requests.suspect import Suspect


class Patience:
    """Time that one request waits for a backend: as configured, and as long as a start may take where another request
    was to blame, or a process is there that does not serve yet."""

    def __init__(self, pool: BackendPool, config: RouterConfig, model: str, suspect: Suspect) -> None:
        """Begin to wait."""
        self._pool = pool
        self._config = config
        self._model = model
        self._suspect = suspect
        self._begin = time.monotonic()

    def left(self) -> float:
        """Return the seconds that are left; none, or less, when it is to be given up."""
        config = self._config
        longest = config.failover_wait_seconds
        if self._suspect.excused or self._pool.is_any_starting(self._model):
            longest = max(longest, config.start_timeout_seconds)
        return self._begin + longest - time.monotonic()
