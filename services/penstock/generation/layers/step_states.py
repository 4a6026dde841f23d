"""Slots and rows of the states of a step's sequences, the same in all layers that keep one, and rows that are gone
through again after drafts were verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from penstock.generation.attention.to_device import uploaded

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionMetadata

# Key of a step's states among AttentionMetadata.plans.
_STATES = "states of the step"


@dataclass(frozen=True, slots=True, eq=False)
class StepStates:
    """Slots and rows of the states of a step's sequences, the same in all layers. Tensors are on the model's device."""

    # (S) int64: slot of each sequence, rows that its state is kept after, and 1 for one that begins with its rows.
    slots: Tensor
    kept: Tensor
    is_new: Tensor
    # (S + 1) int32: where the sequences' rows begin.
    query_start: Tensor
    # Sequences that are alike in their number of rows, kept ones among them, and in being new.
    batches: tuple[StateBatch, ...]
    # Slots with rows that may be taken back, and these among the step's.
    later: tuple[tuple[int, slice], ...] = ()
    # Rows of an earlier step that come before the step's own; all of the above counts them. None: there are none.
    again: EarlierRows | None = None


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
    device, slots = metadata.query_start.device, metadata.state_slots
    is_new = [count == length for count, length in zip(metadata.query_lens, metadata.kv_lens, strict=True)]
    own, own_kept = np.array(metadata.query_lens), np.array(metadata.state_kept or metadata.query_lens)
    behind = np.array(metadata.state_behind or [0] * len(own))
    counts, kept = own + behind, own_kept + behind
    begins, own_begins = (np.concatenate(([0], np.cumsum(one))) for one in (counts, own))

    def moved(values: np.ndarray) -> Tensor:
        return uploaded(values.astype(np.int64), device)

    kinds: dict[tuple[int, int, bool], list[int]] = {}
    for place, kind in enumerate(zip(counts.tolist(), kept.tolist(), is_new, strict=True)):
        kinds.setdefault(kind, []).append(place)
    batches = [
        StateBatch(
            moved(np.array([slots[one] for one in members])),
            moved(begins[members][:, None] + np.arange(count)),
            own_rows,
            new,
        )
        for (count, own_rows, new), members in kinds.items()
    ]
    later = [
        (slots[place], slice(first + rows, first + count))
        for place, (first, rows, count) in enumerate(
            zip(own_begins[:-1].tolist(), own_kept.tolist(), own.tolist(), strict=True)
        )
        if rows < count
    ]
    again, query_start = None, metadata.query_start
    if metadata.state_behind is not None:
        query_start = uploaded(begins.astype(np.int32), device)
        again = _again(slots, behind, own, moved)
    return StepStates(
        slots=moved(np.array(slots)),
        kept=moved(kept),
        is_new=moved(np.array(is_new)),
        query_start=query_start,
        batches=tuple(batches),
        later=tuple(later),
        again=again,
    )


def _again(
    slots: Sequence[int], behind: np.ndarray, own: np.ndarray, moved: Callable[[np.ndarray], Tensor]
) -> EarlierRows:
    """Return the earlier rows of a step, by the number of them and of own rows of each sequence."""
    total = int(behind.sum())
    # Of earlier rows, then of own ones, each in the order of the sequences.
    sequence = np.concatenate((np.repeat(np.arange(len(behind)), behind), np.repeat(np.arange(len(own)), own)))
    order = np.argsort(sequence, kind="stable")
    return EarlierRows(
        slots=tuple((slot, count) for slot, count in zip(slots, behind.tolist(), strict=True) if count),
        order=moved(order),
        own=moved(np.flatnonzero(order >= total)),
    )
