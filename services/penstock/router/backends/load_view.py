"""Load of one backend as the router sees it: its last report, and what was sent there since."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

from penstock.common.pace import Demand, Pace
from penstock.router.backends.load_report import LoadReport
from penstock.router.backends.report_age import ReportAge

# Reports come at least so often while steps end.
_MOST_SECONDS_SINCE = 0.25


class LoadView:
    """Last report of a backend, corrected by our own requests. Implements policy.CandidateLoad."""

    def __init__(
        self,
        in_flight: Callable[[], int],
        idle_in_flight: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make it: nothing is reported. `in_flight`: number of our requests that are there now; `idle_in_flight`: of
        those that use idle capacity only."""
        self._in_flight, self._idle_in_flight, self._clock = in_flight, idle_in_flight, clock
        self.connect()

    def connect(self) -> None:
        """Begin anew: on this connection nothing is reported yet."""
        self._set_report(LoadReport(), 0, 0)
        self._num_reports = self._progress = 0
        self._age = ReportAge()
        # Our time at which the figures were measured; None: that is not told.
        self._measured_at: float | None = None
        # Requests that no report counts yet, in order: the time, the tenant and its tokens; and their sums.
        self._sent: deque[tuple[float, str, float]] = deque()
        self._sent_tokens: dict[str, float] = {}

    def take(self, report: LoadReport) -> None:
        """Take a report: it counts what had arrived there when its figures were measured.

        A request takes as long to get there as a report takes to get here.
        """
        self._num_reports += 1
        self._progress += report.is_stepping or report.step != self._report.step
        self._set_report(report, self._in_flight(), self._idle_in_flight())
        now = self._clock()
        age = self._age.of(report.measured_at, now)
        self._measured_at = now - age if report.measured_at else None
        counted_until = now - 2 * age
        while self._sent and self._sent[0][0] <= counted_until:
            self._sent.popleft()
        self._sent_tokens.clear()
        for _, tenant, tokens in self._sent:
            self._add_sent(tenant, tokens)

    def _set_report(self, report: LoadReport, in_flight: int, idle_in_flight: int) -> None:
        """Set a report, with the number of our requests there when it came, and what every choice needs of it."""
        self._report = report
        # Requests of others, and those of them that use idle capacity only; None: not told, or all wait for them.
        self._others = float(max(report.requests - in_flight, 0))
        told = report.idle_only_requests
        self._idle_others = None if told is None else max(told - idle_in_flight, 0)
        # Number of our requests with which its queue is full: what was sent since waits, running ones are not in it.
        most = report.max_queued_requests
        self._full_at = most - report.waiting_requests + in_flight if most > 0 else math.inf

    def note_sent(self, demand: Demand) -> None:
        """Note a request that is sent now."""
        tokens = self.pace.tokens(demand)
        self._sent.append((self._clock(), demand.tenant, tokens))
        self._add_sent(demand.tenant, tokens)

    @property
    def report(self) -> LoadReport:
        """Last report of this connection, or the default."""
        return self._report

    @property
    def has_report(self) -> bool:
        """True once a report has come on this connection."""
        return self._num_reports > 0

    @property
    def num_reports(self) -> int:
        """Number of reports of this connection."""
        return self._num_reports

    @property
    def progress(self) -> int:
        """Number of those that show progress of the engine."""
        return self._progress

    @property
    def requests(self) -> float:
        """Number of requests in the report, corrected by ours that were sent and finished since."""
        return self._others + self._in_flight()

    @property
    def pressing(self) -> float:
        """Number of those that another request waits for: all, or all but those of idle capacity where these rest."""
        if self._idle_others is None:
            return self.requests
        return max(self.requests - self._idle_others - self._idle_in_flight(), 0.0)

    def standing(self, *, is_idle_only: bool) -> float | None:
        """Number of requests that a new one waits for; None: it would be refused.

        It is `pressing`, or for one that `is_idle_only` `requests`, and `is_full`, in one reading: every choice of a
        backend asks this of many.
        """
        in_flight = self._in_flight()
        if in_flight >= self._full_at:
            return None
        if is_idle_only or self._idle_others is None:
            return self._others + in_flight
        return max(self._others + in_flight - self._idle_others - self._idle_in_flight(), 0.0)

    @property
    def room(self) -> float:
        """Number of requests that its queue would still take; infinite when it reports no bound."""
        return self._full_at - self._in_flight()

    @property
    def is_full(self) -> bool:
        """True when another request would be refused."""
        return self.room <= 0

    @property
    def kv_pressure(self) -> float:
        """Share of KV blocks held by running requests."""
        return self._report.kv_pressure

    @property
    def pace(self) -> Pace:
        """Figures of the report."""
        return self._report.pace

    @property
    def seconds_since(self) -> float:
        """Seconds since the figures were measured, in which the backend surely went on; 0: that is not told."""
        if self._measured_at is None:
            return 0.0
        return min(self._clock() - self._measured_at, _MOST_SECONDS_SINCE)

    @property
    def sent_tokens(self) -> Mapping[str, float]:
        """Tokens that were sent and that the report does not count, by tenant."""
        return self._sent_tokens

    def _add_sent(self, tenant: str, tokens: float) -> None:
        self._sent_tokens[tenant] = self._sent_tokens.get(tenant, 0.0) + tokens
