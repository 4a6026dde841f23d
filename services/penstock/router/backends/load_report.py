"""A backend's load report as plain data. Only this file knows both it and the message."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.common.pace import Pace
from penstock.v1 import admin_pb2, common_pb2

# Above it a reported figure is none that an engine has.
_MOST_FIGURE = 1e15
# A backend of an older release does not tell its state.
_LOADED = (common_pb2.MODEL_STATE_UNSPECIFIED, common_pb2.MODEL_STATE_READY)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load of a backend's process at one time. The default is that of one which has not reported."""

    # Tells the process from one before it; empty: it does not tell.
    start_id: str = ""
    # Number of its steps; and of the one under way: it is no longer than such steps are, much longer, or hangs.
    step: int = 0
    is_stepping: bool = False
    is_overdue: bool = False
    is_hung: bool = False
    is_loaded: bool = False
    is_draining: bool = False
    waiting_requests: int = 0
    running_requests: int = 0
    # Of both, those of idle capacity; None: others wait for them there, or it does not tell.
    idle_only_requests: int | None = None
    # 0: its queue has no bound.
    max_queued_requests: int = 0
    kv_pressure: float = 0.0
    adapters_version: int = 0
    pace: Pace = field(default_factory=Pace)
    # Time of these figures on a clock of that process; 0: it does not tell.
    measured_at: float = 0.0

    @property
    def requests(self) -> int:
        """Requests that wait or run."""
        return self.waiting_requests + self.running_requests


def from_load(load: admin_pb2.Load) -> LoadReport:
    """Return a report as plain data."""
    return LoadReport(
        start_id=load.process_start_id,
        step=load.step,
        is_stepping=load.HasField("step_seconds") and not load.step_overdue,
        is_overdue=load.step_overdue,
        is_hung=load.step_hung,
        is_loaded=load.state in _LOADED,
        is_draining=load.draining,
        waiting_requests=load.waiting_requests,
        running_requests=load.running_requests,
        idle_only_requests=load.idle_only_requests if load.HasField("idle_only_requests") else None,
        max_queued_requests=load.max_queued_requests,
        kv_pressure=load.kv_blocks_used / load.kv_blocks_total if load.kv_blocks_total else 0.0,
        adapters_version=load.adapters_version,
        pace=to_pace(load),
        measured_at=load.measured_at if abs(load.measured_at) < _MOST_FIGURE else 0.0,
    )


def to_pace(report: admin_pb2.Load) -> Pace:
    """Return a report's figures; those of a backend that reports none, or such as none has, refuse nothing."""
    if not report.HasField("pace"):
        return Pace()
    pace = report.pace
    figures = (
        pace.tokens_per_second,
        pace.step_seconds,
        pace.least_step_seconds,
        pace.full_step_seconds,
        pace.output_tokens,
        pace.headroom,
        pace.least_headroom,
        pace.most_headroom,
        pace.uneven_seconds,
        *pace.output_shares,
        *(entry.tokens for entry in pace.waiting),
    )
    # NaN fails the comparison, and would stay in every sum.
    if not all(abs(figure) < _MOST_FIGURE for figure in figures):
        return Pace()
    return Pace(
        tokens_per_second=pace.tokens_per_second,
        step_seconds=pace.step_seconds,
        least_step_seconds=pace.least_step_seconds,
        full_step_seconds=pace.full_step_seconds,
        output_tokens=pace.output_tokens,
        output_shares=tuple(pace.output_shares),
        batch_tokens=max(pace.batch_tokens, 1),
        headroom=pace.least_headroom or pace.headroom,
        wait_headroom=pace.most_headroom / pace.least_headroom if pace.least_headroom else 1.0,
        is_busy=pace.is_busy,
        waiting={entry.fair_share_key: entry.tokens for entry in pace.waiting},
        uneven_seconds=pace.uneven_seconds,
        free_places=pace.free_places,
    )
