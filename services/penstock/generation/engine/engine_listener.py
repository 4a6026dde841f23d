"""Listener of an engine: its events, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.common.errors import PenstockError
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import RunnerOutput, SchedulerOutput
    from penstock.generation.engine.decoding.base import Decision
    from penstock.generation.engine.group import SequenceGroup
    from penstock.generation.engine.scheduler import Scheduler
    from penstock.generation.engine.stats import EngineStats, StepSample


class EngineListener:
    """Listener that does nothing: a subclass overrides the events that it wants.

    It is called on the engine's thread, in the middle of its work: it changes nothing there, takes almost no time, and
    raises nothing.
    """

    def added(self, group: SequenceGroup) -> None:
        """Hear that a request was accepted."""

    def scheduled(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Hear of a step that is scheduled and not run yet."""

    def copied(self, output: SchedulerOutput, result: RunnerOutput) -> None:
        """Hear of a step's copies of blocks, once they are done. Not of a step without any."""

    def advanced(self, group: SequenceGroup, drawers: Iterable[Sequence], decision: Decision) -> None:
        """Hear of the effect of a request's draws, before blocks are forked and freed. Once a request and step."""

    def stepped(self, scheduler: Scheduler, sample: StepSample, started: float, ended: float) -> None:
        """Hear of the end of the step, drafts for the next one included; times are the engine's clock's."""

    def closed(self, group: SequenceGroup, error: PenstockError | None) -> None:
        """Hear that a request ends: by itself when it has no sequence left, else it is cut off."""

    def charged(self, group: SequenceGroup, tokens: int) -> None:
        """Hear the cost of an ended request for its tenant."""

    def set_back(self, group: SequenceGroup) -> None:
        """Hear that a running request was preempted between two steps, and its blocks forgotten."""

    def claimed(self, blocks: Iterable[int], host_blocks: Iterable[int]) -> None:
        """Hear of all blocks that callers have claimed from now on, of both pools."""

    def commanded(self, device: Iterable[int], host: Iterable[int], stats: EngineStats) -> None:
        """Hear that blocks of either pool were overwritten by somebody outside."""

    def cleared(self) -> None:
        """Hear that the prefix cache was cleared."""


class Listeners:
    """Listeners of one engine by event, in order. Those that do not override an event are not called for it."""

    def __init__(self, listeners: Iterable[EngineListener]) -> None:
        """`listeners` hear each event in their order."""
        self.all = tuple(listeners)
        self.added: tuple[Callable[[SequenceGroup], None], ...] = self._hearing("added")
        self.scheduled: tuple[Callable[[Scheduler, SchedulerOutput], None], ...] = self._hearing("scheduled")
        self.copied: tuple[Callable[[SchedulerOutput, RunnerOutput], None], ...] = self._hearing("copied")
        self.advanced: tuple[Callable[[SequenceGroup, Iterable[Sequence], Decision], None], ...] = self._hearing(
            "advanced"
        )
        self.stepped: tuple[Callable[[Scheduler, StepSample, float, float], None], ...] = self._hearing("stepped")
        self.closed: tuple[Callable[[SequenceGroup, PenstockError | None], None], ...] = self._hearing("closed")
        self.charged: tuple[Callable[[SequenceGroup, int], None], ...] = self._hearing("charged")
        self.set_back: tuple[Callable[[SequenceGroup], None], ...] = self._hearing("set_back")
        self.claimed: tuple[Callable[[Iterable[int], Iterable[int]], None], ...] = self._hearing("claimed")
        self.commanded: tuple[Callable[[Iterable[int], Iterable[int], EngineStats], None], ...] = self._hearing(
            "commanded"
        )
        self.cleared: tuple[Callable[[], None], ...] = self._hearing("cleared")

    def _hearing(self, event: str) -> tuple[Any, ...]:
        nothing = getattr(EngineListener, event)
        return tuple(getattr(one, event) for one in self.all if getattr(type(one), event) is not nothing)
