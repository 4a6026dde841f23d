"""The step that is being put together."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from penstock.generation.core.step import Fork, ScheduledSequence, SchedulerOutput

if TYPE_CHECKING:
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.engine.group import SequenceGroup


class HeldBack(enum.Enum):
    """Reason that a step holds no more than it does."""

    # Everything that could be computed is in it.
    NOTHING = "nothing"
    # Its rows are used up.
    BUDGET = "budget"
    # As many sequences run as may.
    SEQUENCES = "sequences"
    # The pool has no room: a request waits for it, or gave way.
    BLOCKS = "blocks"


class StepPlan:
    """Entries of one step and the budget that is left. A preempted group's entries and copies can be taken out."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.preempted = False
        # Why admission stopped.
        self.admission_stopped = HeldBack.NOTHING
        # groups[i] is the group of the i-th entry.
        self.groups: list[SequenceGroup] = []
        self._entries: list[ScheduledSequence] = []
        self._copies: list[tuple[SequenceGroup, tuple[int, int]]] = []

    @property
    def held_back(self) -> HeldBack:
        """Reason that nothing more is in it."""
        if self.preempted:
            return HeldBack.BLOCKS
        if self.admission_stopped is HeldBack.NOTHING and not self.budget:
            return HeldBack.BUDGET
        return self.admission_stopped

    @property
    def entries(self) -> tuple[ScheduledSequence, ...]:
        """What is scheduled so far; entry i is of groups[i]."""
        return tuple(self._entries)

    @property
    def num_entries(self) -> int:
        """Sequences that are scheduled so far."""
        return len(self._entries)

    def add(
        self,
        group: SequenceGroup,
        sequence: Sequence,
        start: int,
        num_tokens: int,
        sample: tuple[Sequence, ...],
        copy: tuple[int, int] | None,
    ) -> None:
        """Schedule tokens [start, start + num_tokens) of `sequence`, after `copy`."""
        self.groups.append(group)
        self._entries.append(_entry(sequence, start, num_tokens, sample))
        self.budget -= num_tokens
        if copy is not None:
            self._copies.append((group, copy))

    def end(self, sequence: Sequence) -> int | None:
        """Up to which token `sequence` is computed in this step; None: not at all. O(entries)."""
        found = (entry.start + entry.num_tokens for entry in self._entries if entry.sequence is sequence)
        return next(found, None)

    def extend(self, sequence: Sequence, end: int, sample: tuple[Sequence, ...]) -> None:
        """Schedule a sequence that is in the step already up to token `end`. O(entries)."""
        place = next(place for place, entry in enumerate(self._entries) if entry.sequence is sequence)
        entry = self._entries[place]
        self._entries[place] = _entry(sequence, entry.start, end - entry.start, sample)
        self.budget -= end - entry.start - entry.num_tokens

    def remove(self, group: SequenceGroup) -> None:
        """Take back all that was planned for `group`.

        Its copies go as well: their destinations are free again and may become another copy's.
        """
        self.preempted = True
        kept = [(other, entry) for other, entry in zip(self.groups, self._entries, strict=True) if other is not group]
        self.budget += sum(entry.num_tokens for entry in self._entries) - sum(entry.num_tokens for _, entry in kept)
        self.groups = [other for other, _ in kept]
        self._entries = [entry for _, entry in kept]
        self._copies = [(other, copy) for other, copy in self._copies if other is not group]

    def output(self, forks: tuple[Fork, ...], released: tuple[int, ...]) -> SchedulerOutput:
        """What the runner is told."""
        return SchedulerOutput(tuple(self._entries), tuple(copy for _, copy in self._copies), forks, released)


def _entry(sequence: Sequence, start: int, num_tokens: int, sample: tuple[Sequence, ...]) -> ScheduledSequence:
    probes: tuple[tuple[int, Sequence], ...] = ()
    if sequence.probes:
        end = start + num_tokens
        probes = tuple((index - start, probe) for index, probe in sequence.probes if start <= index < end)
    return ScheduledSequence(sequence, start, num_tokens, sample, probes)
