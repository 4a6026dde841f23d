"""Plan of the step that is being put together."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from penstock.generation.core.step import Fork, ScheduledSequence, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.adapter import Adapter
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.engine.block_copies import BlockCopies
    from penstock.generation.engine.group import SequenceGroup


class HeldBack(enum.Enum):
    """Reason why a step is not larger."""

    # Everything that could be computed is in it.
    NOTHING = "nothing"
    # Its rows are used up, and there is more to compute.
    BUDGET = "budget"
    # The largest allowed number of sequences runs.
    SEQUENCES = "sequences"
    # The pool has no room: a request waits for it, or was preempted.
    BLOCKS = "blocks"


class StepPlan:
    """Entries of one step, and the rest of the budget. Entries and copies of a preempted group can be removed."""

    def __init__(self, budget: int, number: int, copies: BlockCopies) -> None:
        """`number` of the step, from 1; 0: no step. `copies` may have some already."""
        self.budget = budget
        self.number = number
        self.preempted = False
        # True: with a larger budget it would be larger.
        self.is_short = False
        # True: some prompt in it has embeddings of its own.
        self.has_embeds = False
        # Reason why admission stopped.
        self.admission_stopped = HeldBack.NOTHING
        # One list, so that a dump from another thread finds every entry with its group.
        self._entries: list[tuple[SequenceGroup, ScheduledSequence]] = []
        self._copies = copies

    @property
    def held_back(self) -> HeldBack:
        """Reason why the step is not larger."""
        if self.preempted:
            return HeldBack.BLOCKS
        if self.admission_stopped is HeldBack.NOTHING and self.is_short and not self.budget:
            return HeldBack.BUDGET
        return self.admission_stopped

    @property
    def entries(self) -> tuple[tuple[SequenceGroup, ScheduledSequence], ...]:
        """Entries scheduled so far, each with its group."""
        return tuple(self._entries)

    @property
    def num_entries(self) -> int:
        """Number of sequences scheduled so far."""
        return len(self._entries)

    def add(
        self,
        group: SequenceGroup,
        sequence: Sequence,
        start: int,
        num_tokens: int,
        sample: tuple[Sequence, ...],
        copies: Seq[tuple[int, int]],
    ) -> None:
        """Schedule tokens [start, start + num_tokens) of `sequence`, to be computed after `copies`."""
        self._entries.append((group, _entry(sequence, start, num_tokens, sample)))
        self.budget -= num_tokens
        for source, destination in copies:
            self._copies.within(group, source, destination)

    def end(self, sequence: Sequence) -> int | None:
        """Return the token up to which this step computes `sequence`; None: not at all. O(entries)."""
        found = (entry.start + entry.num_tokens for _, entry in self._entries if entry.sequence is sequence)
        return next(found, None)

    def extend(self, sequence: Sequence, end: int, sample: tuple[Sequence, ...]) -> None:
        """Schedule further tokens, up to `end`, of a sequence that is in the step already. O(entries)."""
        place = next(place for place, (_, entry) in enumerate(self._entries) if entry.sequence is sequence)
        group, entry = self._entries[place]
        self._entries[place] = (group, _entry(sequence, entry.start, end - entry.start, sample))
        self.budget -= end - entry.start - entry.num_tokens

    def remove(self, group: SequenceGroup, *, keep_copies: bool = False) -> None:
        """Remove everything planned for `group`.

        Its copies are removed, too: their destinations are free again. `keep_copies`: they are swapped out afterwards.
        """
        self.preempted = True
        self.budget += sum(entry.num_tokens for other, entry in self._entries if other is group)
        self._entries = [(other, entry) for other, entry in self._entries if other is not group]
        if not keep_copies:
            self._copies.forget_group(group)

    def output(
        self,
        forks: tuple[Fork, ...],
        released: tuple[int, ...],
        parked: tuple[int, ...] = (),
        *,
        has_adapters: bool = False,
    ) -> SchedulerOutput:
        """Return the step as the runner gets it. `has_adapters`: some group may have one."""
        entries = tuple([entry for _, entry in self._entries])
        adapters = self._adapters() if has_adapters else None
        return SchedulerOutput(entries, self._copies.listed(), forks, released, self.has_embeds, adapters, parked)

    def _adapters(self) -> tuple[Adapter | None, ...] | None:
        adapters = tuple([group.request.adapter for group, _ in self._entries])
        return None if all(adapter is None for adapter in adapters) else adapters


def _entry(sequence: Sequence, start: int, num_tokens: int, sample: tuple[Sequence, ...]) -> ScheduledSequence:
    verifiers: tuple[tuple[int, Sequence], ...] = ()
    if sequence.verifiers:
        end = start + num_tokens
        verifiers = tuple((index - start, verifier) for index, verifier in sequence.verifiers if start <= index < end)
    return ScheduledSequence(sequence, start, num_tokens, sample, verifiers)
