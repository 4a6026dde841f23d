"""Counter of an engine's events: the listener that keeps its statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.common.errors import Cancelled
from penstock.generation.engine.block_copies import num_swapped
from penstock.generation.engine.engine_listener import EngineListener

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.common.errors import PenstockError
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import RunnerOutput, SchedulerOutput
    from penstock.generation.engine.decoding.base import Decision
    from penstock.generation.engine.group import SequenceGroup
    from penstock.generation.engine.scheduler import Scheduler
    from penstock.generation.engine.stats import EngineStats, StepSample


class EventCounter(EngineListener):
    """Counter into `EngineStats`. What the scheduler alone knows, such as preemptions, it counts itself."""

    def __init__(self, stats: EngineStats) -> None:
        """It comes before other listeners: they may read `stats`."""
        self._stats = stats

    def added(self, group: SequenceGroup) -> None:
        """Count the prompt's tokens."""
        self._stats.prompt_tokens += len(group.request.prompt_token_ids)

    def copied(self, output: SchedulerOutput, result: RunnerOutput) -> None:
        """Count the blocks copied to the host pool and from it."""
        num_out, num_in = num_swapped(output.copies)
        if num_out or num_in:
            stats = self._stats
            stats.host_out_blocks += num_out
            stats.host_in_blocks += num_in
            stats.host_out_seconds += result.out_seconds
            stats.host_in_seconds += result.in_seconds

    def advanced(self, group: SequenceGroup, drawers: Iterable[Sequence], decision: Decision) -> None:
        """Count drafts and generated tokens."""
        stats = self._stats
        if decision.drafts:
            for kind, accepted, rejected in decision.drafts:
                stats.count_drafts(kind, accepted, rejected)
        for emission in decision.emissions:
            stats.generated_tokens += len(emission.token_ids)

    def stepped(self, scheduler: Scheduler, sample: StepSample, started: float, ended: float) -> None:
        """Count the step, and take the pools' own totals."""
        stats = self._stats
        stats.evictions = scheduler.pool.evictions
        if scheduler.host is not None:
            stats.host_evictions = scheduler.host.pool.evictions
        stats.copy_on_write_blocks = scheduler.tables.copied_blocks
        stats.record(sample)

    def closed(self, group: SequenceGroup, error: PenstockError | None) -> None:
        """Count the request's end."""
        self._stats.requests_finished += 1
        self._stats.requests_failed += error is not None and not isinstance(error, Cancelled)
