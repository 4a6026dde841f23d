"""Inputs of the model for a step, as tensors, and the adapters of its rows. Block tables persist from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.to_device import uploaded

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    from penstock.generation.core.adapter import Adapter
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import Bundles, ScheduledSequence
    from penstock.generation.layers.lora import AdapterBatch, AdapterWeights
    from penstock.generation.models.language_model import LanguageModel

_FIRST_SLOTS, _FIRST_BLOCKS = 16, 64


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Arguments of one forward pass over T rows, and the start and end of each scheduled entry's rows."""

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    metadata: AttentionMetadata
    # One more than the number of entries.
    row_starts: list[int]
    # metadata.block_tables, or the tables of all views, on the host: on the CPU the same memory.
    tables: np.ndarray


class InputBatch:
    """Block ids of every sequence in rows of one array, so that a decoding sequence costs at most one block id a step.

    It relies on a rule of the block tables: until a sequence is released or parked, the blocks before that of its first
    uncomputed token after its last step never change.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = np.zeros((_FIRST_SLOTS, _FIRST_BLOCKS), dtype=np.int32)
        self._free_slots = list(range(_FIRST_SLOTS))
        # seq_id -> row of _tables; row -> number of its entries that are final.
        self._slots: dict[int, int] = {}
        self._num_final = [0] * _FIRST_SLOTS
        # Row -> (number of its blocks, the last one): most steps of a decoding sequence change neither.
        self._ends = [(0, -1)] * _FIRST_SLOTS
        # 0, 1, 2, ...: row starts of the last step with entries of one row each.
        self._row_starts = torch.empty(0, dtype=torch.int32)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget the blocks of sequences that are gone or parked; ids that were never scheduled are fine."""
        for seq_id in seq_ids:
            slot = self._slots.pop(seq_id, None)
            if slot is not None:
                self._free_slots.append(slot)

    def build(self, scheduled: Seq[ScheduledSequence], _bundles: Bundles | None = None) -> ModelInputs:
        """Return inputs of the entries' tokens [start, start + num_tokens), in order. Needs at least one entry."""
        if all(entry.num_tokens == 1 for entry in scheduled):
            return self._build_rows(scheduled)
        input_ids, row_starts = token_rows(scheduled)
        slots = [self._refresh(entry) for entry in scheduled]
        context_lens = [entry.start + entry.num_tokens for entry in scheduled]
        tables = self._tables[slots, : -(-max(context_lens) // self._block_size)]
        metadata, positions_T = AttentionMetadata.build(
            [entry.num_tokens for entry in scheduled],
            context_lens,
            torch.from_numpy(tables),
            self._block_size,
            self._device,
        )
        return ModelInputs(self._moved(np.array(input_ids)), positions_T, metadata, row_starts, tables)

    def _build_rows(self, scheduled: Seq[ScheduledSequence]) -> ModelInputs:
        """Build for entries of one token each: in a decode step caches are cold, and each operator takes tens of µs."""
        size, count = self._block_size, len(scheduled)
        slots = [self._refresh(entry) for entry in scheduled]
        starts = [entry.start for entry in scheduled]
        context_lens = [start + 1 for start in starts]
        ids = [entry.sequence.token_ids[entry.start] for entry in scheduled]
        blocks = [entry.sequence.block_table[entry.start // size] for entry in scheduled]
        places = [block * size + start % size for block, start in zip(blocks, starts, strict=True)]
        longest = max(context_lens)
        tables = self._tables[slots, : -(-longest // size)]
        rows = self._moved(np.array((ids, starts, places), dtype=np.int64))
        input_ids_T, positions_T, slot_mapping_T = rows.unbind()
        if len(self._row_starts) != count + 1:
            self._row_starts = self._moved(np.arange(count + 1, dtype=np.int32))
        metadata = AttentionMetadata(
            query_start=self._row_starts,
            context_lens=self._moved(np.array(context_lens, dtype=np.int32)),
            block_tables=self._moved(tables),
            slot_mapping=slot_mapping_T,
            query_lens=[1] * count,
            kv_lens=context_lens,
            max_context_len=longest,
        )
        return ModelInputs(input_ids_T, positions_T, metadata, list(range(count + 1)), tables)

    def whole_tables(self, sequences: Seq[Sequence]) -> torch.Tensor:
        """Return (S, blocks) int32: all blocks of sequences of the last `build`, those without tokens as well."""
        width = max(len(sequence.block_table) for sequence in sequences)
        return self._moved(self._tables[[self._slots[sequence.seq_id] for sequence in sequences], :width])

    def _moved(self, values: np.ndarray) -> torch.Tensor:
        return uploaded(values, self._device)

    def _refresh(self, entry: ScheduledSequence) -> int:
        """Bring the sequence's row up to date, from the block of its first token to compute on. Return its slot.

        The update begins earlier when that token is not at the end of the last step: the blocks between were taken over
        from other sequences.
        """
        sequence, start = entry.sequence, entry.start
        slot = self._slots.get(sequence.seq_id)
        if slot is None:
            slot = self._slots[sequence.seq_id] = self._new_slot()
        blocks = sequence.block_table
        first = min(start // self._block_size, self._num_final[slot])
        ends = (len(blocks), blocks[-1])
        if first < len(blocks) - 1 or self._ends[slot] != ends:
            if len(blocks) > self._tables.shape[1]:
                self._tables = _grown(self._tables, axis=1, minimum=len(blocks))
            self._tables[slot, first : len(blocks)] = blocks[first:] if first else blocks
            self._ends[slot] = ends
        self._num_final[slot] = (start + entry.num_tokens) // self._block_size
        return slot

    def _new_slot(self) -> int:
        if not self._free_slots:
            count = len(self._tables)
            self._tables = _grown(self._tables, axis=0, minimum=count + 1)
            self._num_final.extend([0] * (len(self._tables) - count))
            self._ends.extend([(0, -1)] * (len(self._tables) - count))
            self._free_slots = list(range(count, len(self._tables)))
        slot = self._free_slots.pop()
        self._num_final[slot], self._ends[slot] = 0, (0, -1)
        return slot


def token_rows(scheduled: Seq[ScheduledSequence]) -> tuple[list[int], list[int]]:
    """Return the ids of all rows, and the start and end of each entry's."""
    input_ids: list[int] = []
    row_starts = [0]
    for entry in scheduled:
        token_ids, start = entry.sequence.token_ids, entry.start
        if entry.num_tokens == 1:
            input_ids.append(token_ids[start])
        else:
            input_ids.extend(token_ids[start : start + entry.num_tokens])
        row_starts.append(len(input_ids))
    return input_ids, row_starts


def embed_step(
    model: LanguageModel,
    scheduled: Seq[ScheduledSequence],
    inputs: ModelInputs,
    adapters: AdapterBatch | None = None,
) -> torch.Tensor:
    """Return the residual stream before the first layer (T, hidden) of a step of these entries; `adapters` are those of
    its rows.

    Ids in `inputs` become 0 where embeddings replace them: placeholders are outside every vocabulary.
    """
    hidden = model.config.hidden_size
    spans: list[tuple[slice, torch.Tensor]] = []
    for entry, first in zip(scheduled, inputs.row_starts, strict=False):
        embeds = entry.sequence.embeds
        if embeds is None or entry.start >= embeds.num_tokens:
            continue
        count = min(entry.start + entry.num_tokens, embeds.num_tokens) - entry.start
        offset = entry.start * hidden * model.dtype.itemsize
        rows = torch.frombuffer(embeds.data, dtype=model.dtype, count=count * hidden, offset=offset)
        spans.append((slice(first, first + count), rows.view(count, hidden)))
    for rows_of_entry, _ in spans:
        inputs.input_ids_T[rows_of_entry] = 0
    hidden_TI = model.embed(inputs.input_ids_T, adapters)
    for rows_of_entry, rows_PI in spans:
        hidden_TI[rows_of_entry] = model.given_embeds(rows_PI)
    return hidden_TI


def _grown(tables: np.ndarray, *, axis: int, minimum: int) -> np.ndarray:
    """Return a copy that is at least twice as large along `axis`, filled up with zeros."""
    shape = list(tables.shape)
    shape[axis] = max(2 * shape[axis], minimum)
    grown = np.zeros(shape, dtype=tables.dtype)
    grown[: tables.shape[0], : tables.shape[1]] = tables
    return grown


class AdapterRows:
    """Maker of AdapterBatches. Steps of the same sequences, one row each, share one."""

    def __init__(self) -> None:
        self._last: tuple[tuple[Adapter | None, ...], list[int], AdapterBatch] | None = None

    def of(self, model: LanguageModel, adapters: tuple[Adapter | None, ...], row_starts: list[int]) -> AdapterBatch:
        """Return the batch of a step's entries; `row_starts` as in ModelInputs."""
        last = self._last
        # Adapters compare by identity.
        if last is not None and last[0] == adapters and last[1] == row_starts:
            return last[2]
        weights = [None if adapter is None else cast("AdapterWeights", adapter.weights) for adapter in adapters]
        counts = [end - first for first, end in pairwise(row_starts)]
        batch = model.adapter_batch(weights, counts)
        self._last = (adapters, row_starts, batch)
        return batch

    def release(self, seq_ids: Seq[int]) -> None:
        """Forget the last batch, which holds adapters, when some sequences are gone."""
        if seq_ids:
            self._last = None
