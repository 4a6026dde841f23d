"""Forecast of the time that a request would take at the backends, before any work is put into it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.common.errors import ResourceExhausted
from penstock.common.pace import Demand, Pace
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig

# Share of a deadline that the router counts on. It is a little stricter than the engine: the engine refuses only after
# a prompt was encoded for nothing.
_SHARE_OF_DEADLINE = 0.95
# Fewer tokens are nothing.
_LEAST_TOKENS = 0.5


class Forecast:
    """Refuses requests that no backend would end in time. Belongs to one event loop.

    It counts the tokens of requests that are on their way to a backend (their prompt is not made yet, or they wait for
    admission); backends report what waits there, and know what was sent to them since.
    """

    def __init__(self, pool: BackendPool, config: RouterConfig) -> None:
        self._pool = pool
        self._retry_after = config.retry_after_seconds
        # Model -> tenant -> tokens.
        self._coming: dict[str, dict[str, float]] = {}

    def expect(self, model: str, demand: Demand, left: float | None) -> Callable[[], None]:
        """Count a request as coming; call the result once it is placed or given up.

        `left` are the seconds to its deadline; None: it has none. Raises ResourceExhausted OVERLOADED.
        """
        if left is not None:
            self.check(model, demand, left)
        tokens = self.tokens(model, demand)
        coming = self._coming.setdefault(model, {})
        coming[demand.tenant] = coming.get(demand.tenant, 0.0) + tokens
        return partial(self._arrived, model, demand.tenant, tokens)

    def check(self, model: str, demand: Demand, left: float) -> None:
        """Check that some backend would end a request in time. Raises ResourceExhausted OVERLOADED."""
        # Not one that is ejected: nothing is sent there.
        backends = self._pool.usable(model)
        late = float("inf") if backends else 0.0
        coming = self._coming.get(model, {})
        for backend in backends:
            # What is coming is spread over the backends.
            there = {tenant: tokens / len(backends) for tenant, tokens in coming.items()}
            for tenant, tokens in backend.load.sent_tokens.items():
                there[tenant] = there.get(tenant, 0.0) + tokens
            late = min(late, backend.load.pace.seconds_late(demand, _SHARE_OF_DEADLINE * left, there))
            if not late:
                return
        if late:
            raise ResourceExhausted(
                "the deadline would pass before the answer is complete: too much waits or runs",
                reason="OVERLOADED",
                retry_after_seconds=max(late, self._retry_after),
            )

    def tokens(self, model: str, demand: Demand) -> float:
        """Tokens to expect of a request."""
        backend = next(iter(self._pool.ready(model)), None)
        return (Pace() if backend is None else backend.load.pace).tokens(demand)

    def _arrived(self, model: str, tenant: str, tokens: float) -> None:
        coming = self._coming[model]
        left = coming.pop(tenant, 0.0) - tokens
        # Of sums of fractions something may be left over.
        if left >= _LEAST_TOKENS:
            coming[tenant] = left
