"""Forecast of the time that a request would take at the backends, before any work is put into it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from penstock.common.errors import ResourceExhausted
from penstock.common.pace import Demand, Pace
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig

# Reason of a refusal because of the deadline, here and by an engine.
OVERLOADED = "OVERLOADED"
# Most and least share of a deadline that the router counts on. It is a little stricter than the engine: the engine
# refuses only after a prompt was encoded for nothing.
_MOST_SHARE, _LEAST_SHARE = 0.95, 0.6
# What an engine's refusals take from the share, those within a moment together, and what a second gives back.
_STEP, _MOMENT_SECONDS, _BACK_PER_SECOND = 0.02, 0.1, 0.01
# Fewer tokens are nothing.
_LEAST_TOKENS = 0.5


class Forecast:
    """Refuses requests that no backend would end in time. Belongs to one event loop.

    It counts the tokens of requests that are on their way to a backend (their prompt is not made yet, or they wait for
    admission); backends report what waits there, and know what was sent to them since.

    An engine's figures change from one step to the next. Under overload those requests pass that came at a good moment,
    and the engine refuses them at the next. So the router becomes stricter with a tenant while engines refuse its
    requests. Not with the others: a tenant chooses its deadlines, so it could have any number refused.
    """

    def __init__(self, pool: BackendPool, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        # Of tenants with refusals, the last one at the end: the share of deadlines that counted then, and the time.
        self._shares: dict[str, tuple[float, float]] = {}
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
        counted = self._share_of(demand.tenant) * left
        # Not one that is ejected: nothing is sent there.
        backends = self._pool.usable(model)
        late = float("inf") if backends else 0.0
        coming = self._coming.get(model, {})
        for backend in backends:
            # What is coming is spread over the backends.
            there = {tenant: tokens / len(backends) for tenant, tokens in coming.items()}
            for tenant, tokens in backend.load.sent_tokens.items():
                there[tenant] = there.get(tenant, 0.0) + tokens
            load = backend.load
            late = min(late, load.pace.seconds_late(demand, counted, there, load.seconds_since))
            if not late:
                return
        if late:
            raise ResourceExhausted(
                "the deadline would pass before the answer is complete: too much waits or runs",
                reason=OVERLOADED,
                retry_after_seconds=max(late, self._retry_after),
            )

    def note_refused(self, tenant: str) -> None:
        """Note that an engine refused a request of `tenant`, since it would end too late, that passed here."""
        now, share = self._clock(), self._share_of(tenant)
        if tenant in self._shares and now - self._shares[tenant][1] < _MOMENT_SECONDS:
            return
        self._shares.pop(tenant, None)
        self._shares[tenant] = max(share - _STEP, _LEAST_SHARE), now
        # Those that were refused so long ago that it counts no more.
        while self._share_of(first := next(iter(self._shares))) == _MOST_SHARE:
            del self._shares[first]

    def _share_of(self, tenant: str) -> float:
        found = self._shares.get(tenant)
        if found is None:
            return _MOST_SHARE
        share, at = found
        return min(share + _BACK_PER_SECOND * (self._clock() - at), _MOST_SHARE)

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
