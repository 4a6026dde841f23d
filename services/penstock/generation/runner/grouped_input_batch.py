"""Inputs of a step for a model with groups of layers: one table of each sequence for every view."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.to_device import uploaded
from penstock.generation.runner.input_batch import ModelInputs, token_rows

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    from penstock.generation.attention.cache_layout import CacheLayout
    from penstock.generation.core.sequence import BlockTable, Sequence
    from penstock.generation.core.step import Bundles, ScheduledSequence

_FIRST_SLOTS, _FIRST_BLOCKS = 16, 64


class GroupedInputBatch:
    """Blocks of every sequence in all views (V, slots, blocks), kept from step to step as InputBatch keeps its table.

    The views of a group of layers are the blocks of its bundles, one after another.
    """

    def __init__(self, layout: CacheLayout, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        # First view of each group, and the number of its views.
        self._views: list[tuple[int, int]] = []
        for group in layout.groups:
            self._views.append((sum(width for _, width in self._views), group.num_blocks))
        self._tables = np.zeros((layout.bundle_blocks, _FIRST_SLOTS, _FIRST_BLOCKS), dtype=np.int32)
        self._free_slots = list(range(_FIRST_SLOTS))
        self._slots: dict[int, int] = {}
        # seq_id -> number of its entries that are final; its ends: length and last block of each group's table.
        self._num_final: dict[int, int] = {}
        self._ends: dict[int, list[tuple[int, int]]] = {}

    def release(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            slot = self._slots.pop(seq_id, None)
            if slot is not None:
                self._free_slots.append(slot)
                del self._num_final[seq_id]
                self._ends.pop(seq_id, None)

    def build(self, scheduled: Seq[ScheduledSequence], bundles: Bundles | None) -> ModelInputs:
        """`bundles` as in SchedulerOutput."""
        slots = [self._refresh(entry, bundles) for entry in scheduled]
        lengths = [entry.start + entry.num_tokens for entry in scheduled]
        tables = np.ascontiguousarray(self._tables[:, slots, : -(-max(lengths) // self._block_size)])
        metadata, positions_T = AttentionMetadata.build(
            [entry.num_tokens for entry in scheduled],
            lengths,
            torch.from_numpy(tables),
            self._block_size,
            self._device,
        )
        input_ids, row_starts = token_rows(scheduled)
        return ModelInputs(uploaded(np.array(input_ids), self._device), positions_T, metadata, row_starts, tables)

    def _refresh(self, entry: ScheduledSequence, bundles: Bundles | None) -> int:
        """Bring a sequence's rows up to date, as InputBatch does. Return its slot."""
        sequence, start = entry.sequence, entry.start
        slot = self._slots.get(sequence.seq_id)
        if slot is None:
            slot = self._new_slot(sequence)
        first = min(start // self._block_size, self._num_final[sequence.seq_id])
        ends = [(len(table.blocks), table.blocks[-1]) for table in sequence.tables]
        if first < ends[0][0] - 1 or self._ends.get(sequence.seq_id) != ends:
            longest = max(length for length, _ in ends)
            if longest > self._tables.shape[2]:
                self._grow(blocks=max(2 * self._tables.shape[2], longest))
            for table, (view, width) in zip(sequence.tables, self._views, strict=True):
                fill_views(self._tables[view : view + width, slot], table, first, bundles)
            self._ends[sequence.seq_id] = ends
        self._num_final[sequence.seq_id] = (start + entry.num_tokens) // self._block_size
        return slot

    def _new_slot(self, sequence: Sequence) -> int:
        if not self._free_slots:
            count = self._tables.shape[1]
            self._grow(slots=2 * count)
            self._free_slots = list(range(count, 2 * count))
        slot = self._slots[sequence.seq_id] = self._free_slots.pop()
        self._num_final[sequence.seq_id] = 0
        return slot

    def _grow(self, *, slots: int = 0, blocks: int = 0) -> None:
        views, old_slots, old_blocks = self._tables.shape
        grown = np.zeros((views, max(slots, old_slots), max(blocks, old_blocks)), dtype=np.int32)
        grown[:, :old_slots, :old_blocks] = self._tables
        self._tables = grown


def fill_views(rows_VB: np.ndarray, table: BlockTable, first: int, bundles: Bundles | None) -> None:
    """Write a group's blocks from place `first` on into the rows of its views; blocks that were given back become 0."""
    begin, end = max(first, table.num_released), len(table.blocks)
    rows_VB[:, first:begin] = 0
    if begin >= end:
        return
    held = table.blocks[begin:end]
    rows_VB[:, begin:end] = held if bundles is None else np.array([bundles[block] for block in held]).T
