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
    and the engine refuses them at the next. So the router becomes stricter while engines refuse.
    """

    def __init__(self, pool: BackendPool, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._share, self._share_at = _MOST_SHARE, clock()
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
        counted = self._share_now() * left
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

    def note_refused(self) -> None:
        """Note that an engine refused a request, since it would end too late, that passed here."""
        now = self._clock()
        if self._share == _MOST_SHARE or now - self._share_at >= _MOMENT_SECONDS:
            self._share, self._share_at = max(self._share_now() - _STEP, _LEAST_SHARE), now

    def _share_now(self) -> float:
        if self._share == _MOST_SHARE:
            return _MOST_SHARE
        share = self._share + _BACK_PER_SECOND * (self._clock() - self._share_at)
        if share >= _MOST_SHARE:
            self._share = share = _MOST_SHARE
        return share

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
