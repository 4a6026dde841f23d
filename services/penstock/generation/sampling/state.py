"""State that the sampler keeps per live sequence: its stream of draws, and its processors' trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.generation.sampling.ops.counted_draws import stream_key
from penstock.generation.sampling.row_plan import RowPlan

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sequence import Sequence
    from penstock.generation.sampling.processors.base import Processor
    from penstock.generation.sampling.trackers import Tracker


class SamplingState:
    """State of one sequence from its first draw until it is released; rebuilt from the ids after a preemption."""

    __slots__ = ("_last", "_num_followed", "key", "plan", "sequence", "trackers")

    def __init__(self, sequence: Sequence, plan: RowPlan | None = None) -> None:
        """Make the state of `sequence`; `plan` is that of its options, made here when it is None."""
        self.sequence = sequence
        self.key = stream_key(sequence.seed)
        self.plan = RowPlan.of(sequence.params) if plan is None else plan
        self.trackers: dict[type[Processor], Tracker] = {
            kind: tracker
            for kind in self.plan.processors
            if (tracker := kind.tracker(sequence, self.plan.prepared.get(kind))) is not None
        }
        # Tokens that the trackers have seen, and the last of them.
        self._num_followed = 0
        self._last = -1

    @property
    def prepared(self) -> dict[type[Processor], object]:
        """Values that the processors prepared from the request's options."""
        return self.plan.prepared

    @property
    def leaves_scores_alone(self) -> bool:
        """True when nothing changes the sequence's scores between the model and the choice."""
        return self.plan.is_plain and not self.sequence.is_constrained

    def catch_up(self) -> None:
        """Follow the tokens that the sequence gained since the last draw: one in a steady decode."""
        if self.trackers:
            self._follow(self.sequence.token_ids)

    def catch_up_without_drafts(self) -> None:
        """Follow the tokens that are not drafts; for a sequence with verifiers that draw: its drafts may be gone in the
        next step."""
        if self.trackers:
            tokens = self.sequence.token_ids
            drafts = self.sequence.num_draft_tokens
            self._follow(tokens[: len(tokens) - drafts] if drafts else tokens)

    def copy(self) -> SamplingState:
        """Return a state for a sequence that continues the tokens followed here; `attach` it before use."""
        twin = SamplingState.__new__(SamplingState)
        twin.sequence, twin.key, twin.plan = self.sequence, self.key, self.plan
        twin.trackers = {kind: tracker.copy() for kind, tracker in self.trackers.items()}
        twin._num_followed, twin._last = self._num_followed, self._last
        return twin

    def attach(self, sequence: Sequence) -> SamplingState:
        """Make this the state of `sequence`, which has the same options, and return it."""
        if sequence.seed != self.sequence.seed:
            self.key = stream_key(sequence.seed)
        self.sequence = sequence
        return self

    def has_followed_at_most(self, num_tokens: int) -> bool:
        """True when no token after the first `num_tokens` is counted."""
        return self._num_followed <= num_tokens

    def _follow(self, token_ids: Seq[int]) -> None:
        start = self._num_followed
        if start > len(token_ids) or (start and token_ids[start - 1] != self._last):
            # Tokens that were followed are gone.
            start = 0
        if start < len(token_ids):
            for tracker in self.trackers.values():
                tracker.follow(token_ids, start)
            self._num_followed, self._last = len(token_ids), token_ids[-1]
