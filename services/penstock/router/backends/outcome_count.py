"""Count of what becomes of one backend's attempts, for metrics and ejection."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from penstock.router.backends.discovery import BackendAddress
from penstock.router.backends.outliers import FAILURES, Outcome, Outliers, Probe
from penstock.router.metrics import RouterMetrics


class OutcomeCount:
    """Outcomes of one backend. Belongs to one event loop."""

    def __init__(
        self,
        where: BackendAddress,
        outliers: Outliers,
        metrics: RouterMetrics,
        loss_seconds: float,
        *,
        takes_work: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make it. `loss_seconds`: losses within this time count as one; `takes_work`: True while it is ready."""
        self._where = where
        self._outliers = outliers
        self._metrics = metrics
        self._loss_seconds = loss_seconds
        self._takes_work = takes_work
        self._clock = clock
        # Time of the last loss that was counted on this connection.
        self._lost_at = -math.inf

    def connect(self) -> None:
        """Note that a connection begins."""
        self._lost_at = -math.inf

    def note(self, outcome: Outcome, probe: Probe | None = None, has_begun: bool = False) -> None:
        """Count an outcome. A backend that is not ready has told so, and refuses by right."""
        is_failure = outcome in FAILURES
        if outcome is Outcome.LOST and probe is None and self._is_same_loss():
            return
        if is_failure:
            self._metrics.backend_failures(self._where.target, outcome.value).inc()
        if not is_failure or probe is not None or self._takes_work():
            self._outliers.note(self._where.address, outcome, probe, has_begun=has_begun)

    def _is_same_loss(self) -> bool:
        """True when a loss was counted a moment ago: one connection or process takes all of its requests with it."""
        now = self._clock()
        if now - self._lost_at < self._loss_seconds:
            return True
        self._lost_at = now
        return False
