"""Places of the states of a step's sequences, and the rows that these states are kept after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionMetadata
    from penstock.generation.attention.state_pool import StatePool
    from penstock.generation.core.step import ScheduledSequence


def with_states(
    metadata: AttentionMetadata, states: StatePool, scheduled: Sequence[ScheduledSequence]
) -> AttentionMetadata:
    """Return a step's metadata with the slots of its sequences. A state is kept before drafts: those that turn out
    wrong are taken back, and the next step goes through the others again. Raises RuntimeError as StatePool.place."""
    slots = states.place((entry.sequence.seq_id, entry.start) for entry in scheduled)
    behind = states.behind(slots, (entry.start for entry in scheduled))
    kept = tuple(map(_num_sure, scheduled)) if any(entry.verifiers for entry in scheduled) else None
    return replace(metadata, state_slots=slots, state_kept=kept, state_behind=behind)


def _num_sure(entry: ScheduledSequence) -> int:
    """Return the number of rows of tokens that are no drafts, at least one."""
    sequence = entry.sequence
    return min(entry.num_tokens, sequence.num_tokens - sequence.num_draft_tokens - entry.start)
