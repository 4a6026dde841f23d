"""Slots and rows of the states of a step's sequences, the same in all layers that keep one, and rows that are gone
through again after drafts were verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from penstock.generation.attention.to_device import uploaded

if TYPE_CHECKING:
    import torch

    from penstock.generation.attention.base import AttentionMetadata

# Key of a step's states among AttentionMetadata.plans.
_STATES = "states of the step"


@dataclass(frozen=True, eq=False)
class StepStates:
    """Slots and rows of the states of a step's sequences, the same in all layers. Tensors are on the model's device."""

    # (S) int64: slot of each sequence, rows that its state is kept after, and 1 for one that begins with its rows.
    slots: Tensor
    kept: Tensor
    is_new: Tensor
    # (S + 1) int32: where the sequences' rows begin.
    query_start: Tensor
    # Of each sequence, on the host: number of rows, of kept ones, and True if it is new.
    kinds: tuple[tuple[int, int, bool], ...]
    # Slots with rows that may be taken back, and these among the step's.
    later: tuple[tuple[int, slice], ...] = ()
    # Rows of an earlier step that come before the step's own; all of the above counts them. None: there are none.
    again: EarlierRows | None = None

    @cached_property
    def batches(self) -> tuple[StateBatch, ...]:
        """Sequences that are alike in their number of rows, kept ones among them, and in being new."""
        device, begins = self.slots.device, np.cumsum([0, *(count for count, _, _ in self.kinds)])
        alike: dict[tuple[int, int, bool], list[int]] = {}
        for number, kind in enumerate(self.kinds):
            alike.setdefault(kind, []).append(number)
        return tuple(
            StateBatch(
                self.slots[uploaded(np.array(members), device)],
                uploaded(begins[members][:, None] + np.arange(count), device),
                kept,
                is_new,
            )
            for (count, kept, is_new), members in alike.items()
        )


@dataclass(frozen=True, slots=True, eq=False)
class EarlierRows:
    """Rows of an earlier step that some sequences go through again, for their states: their results are known."""

    # Slots with such rows, in order, and the number of them.
    slots: tuple[tuple[int, int], ...]
    # (rows) int64: order of all rows, of those of the slots and after them the step's own; and the places of the own
    # ones in it.
    order: Tensor
    own: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StateBatch:
    """Sequences that are computed together where rows are batched."""

    # (N) int64: their slots. (N, rows): their rows.
    slots: Tensor
    rows: Tensor
    kept: int
    is_new: bool


def states_of_step(metadata: AttentionMetadata) -> StepStates:
    """Return the slots and rows of a step, derived once. Raises RuntimeError without slots."""
    known = metadata.plans.get(_STATES)
    if not isinstance(known, StepStates):
        known = metadata.plans[_STATES] = _of_step(metadata)
    return known


def _of_step(metadata: AttentionMetadata) -> StepStates:
    if metadata.state_slots is None:
        raise RuntimeError("a layer that keeps states needs their slots")
    device, counts = metadata.query_start.device, metadata.query_lens
    is_new = [count == length for count, length in zip(counts, metadata.kv_lens, strict=True)]
    kept, later = metadata.state_kept or counts, tuple[tuple[int, slice], ...]()
    if metadata.state_kept is not None:
        later = _later(metadata.state_slots, counts, kept)
    again, query_start, behind = None, metadata.query_start, metadata.state_behind
    if behind is not None:
        again = _again(metadata.state_slots, behind, counts, device)
        counts, kept = ([one + rows for one, rows in zip(each, behind, strict=True)] for each in (counts, kept))
        query_start = uploaded(np.cumsum([0, *counts], dtype=np.int32), device)
    slots, kept_S, new_S = (uploaded(np.array(one, np.int64), device) for one in (metadata.state_slots, kept, is_new))
    kinds = tuple(zip(counts, kept, is_new, strict=True))
    return StepStates(slots, kept_S, new_S, query_start, kinds, later, again)


def _later(slots: Sequence[int], counts: Sequence[int], kept: Sequence[int]) -> tuple[tuple[int, slice], ...]:
    """Return slots with rows after those that are kept, and where these are."""
    ends = np.cumsum(counts).tolist()
    return tuple(
        (slot, slice(end - count + sure, end))
        for slot, end, count, sure in zip(slots, ends, counts, kept, strict=True)
        if sure < count
    )


def _again(slots: Sequence[int], behind: Sequence[int], counts: Sequence[int], device: torch.device) -> EarlierRows:
    """Return the earlier rows of a step, by the numbers of them and of own rows of each sequence."""
    total = sum(behind)
    # Of earlier rows, then of own ones, each in the order of the sequences.
    numbers = range(len(slots))
    sequence = np.concatenate((np.repeat(numbers, behind), np.repeat(numbers, counts)))
    order = np.argsort(sequence, kind="stable")
    return EarlierRows(
        slots=tuple((slot, count) for slot, count in zip(slots, behind, strict=True) if count),
        order=uploaded(order, device),
        own=uploaded(np.flatnonzero(order >= total), device),
    )
