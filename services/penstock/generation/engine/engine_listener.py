"""Listener of an engine: its events, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.generation.core.sequence import Sequence
    from penstock.generation.engine.decoding.base import Decision
    from penstock.generation.engine.group import SequenceGroup
    from penstock.generation.engine.scheduler import Scheduler
    from penstock.generation.engine.stats import EngineStats


class EngineListener:
    """Listener that does nothing: a subclass overrides the events that it wants.

    It is called on the engine's thread, in the middle of its work: it changes nothing there, takes almost no time, and
    raises nothing.
    """

    def added(self, group: SequenceGroup) -> None:
        """Hear that a request was accepted."""

    def scheduled(self, scheduler: Scheduler) -> None:
        """Hear of a step that is scheduled and not run yet."""

    def advanced(self, group: SequenceGroup, drawers: Iterable[Sequence], decision: Decision) -> None:
        """Hear of the effect of a request's draws, before blocks are forked and freed. Once a request and step."""

    def stepped(self, scheduler: Scheduler, stats: EngineStats, started: float, ended: float) -> None:
        """Hear of the end of the step, drafts for the next one included; times are the engine's clock's."""

    def closed(self, group: SequenceGroup) -> None:
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
