"""A step's rows that attend to chosen positions alone (sparse attention), and the others.

Where a context has no more positions than a row may attend to, the row attends to all, and nothing is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from penstock.generation.attention.base import Attention, AttentionMetadata
from penstock.generation.attention.sdpa import SDPAAttention

# From this many times the chosen positions on a prompt's rows read these rows of the pool, and nothing is expanded: the
# work of an expanded context grows with it, that of chosen positions does not.
LONG_CONTEXT = 8
# For devices with attention over blocks of a few sizes.
_ANY_BLOCKS = SDPAAttention()


@dataclass(frozen=True, slots=True)
class SinglePlan:
    """Rows that each read chosen rows of the pool: those of decode steps, drafts, short chunks, and very long contexts.
    Each is a sequence of one row over blocks of one token (KVCachePool.by_slot)."""

    # Of their sequences.
    metadata: AttentionMetadata
    # (T') numbers of these rows in the step; None: they are all rows.
    rows: Tensor | None
    # Positions that each reads, on the host and as a tensor, and the cumulative rows.
    lens: list[int]
    lens_T: Tensor
    starts: Tensor

    def over(self, slots_TK: Tensor) -> AttentionMetadata:
        """Return the metadata of the rows over these slots (T', K)."""
        return AttentionMetadata(
            query_start=self.starts,
            context_lens=self.lens_T,
            block_tables=slots_TK,
            slot_mapping=self.metadata.slot_mapping,
            query_lens=[1] * len(self.lens),
            kv_lens=self.lens,
            max_context_len=max(self.lens),
        )

    def slots_of(self, position_TK: Tensor, block_size: int) -> Tensor:
        """Return the slots (T', K) int32 of positions (T', K) of the rows."""
        counts = torch.tensor(self.metadata.query_lens, device=position_TK.device)
        tables_TB = self.metadata.block_tables.repeat_interleave(counts, dim=0)
        position_TK = position_TK.long()
        return tables_TB.gather(1, position_TK // block_size) * block_size + (position_TK % block_size).to(torch.int32)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Rows [first, last) of a step, the newest ones of one sequence, over its expanded context."""

    first: int
    last: int
    # Of the sequence alone.
    metadata: AttentionMetadata
    # (C) slots of the context.
    slots_C: Tensor


@dataclass(frozen=True, slots=True)
class SparseSplit:
    """A step with contexts that are longer than what a row may attend to."""

    singles: SinglePlan | None
    prompts: tuple[PromptPlan, ...]
    # Metadata and rows of the sequences with shorter contexts; None: there are none.
    dense: tuple[AttentionMetadata, Tensor] | None


def split_sparse(
    metadata: AttentionMetadata, most: int, block_size: int, least_rows: int | None = None
) -> SparseSplit | None:
    """Return the split of a step, made once for all layers; None: every context has at most `most` positions.
    `least_rows`: rows of a sequence from which on its context is expanded; None: each of its rows is a single one."""
    # Short contexts, without a look at any tensor.
    if metadata.max_context_len <= most:
        return None
    known = metadata.plans.get("sparse")
    if known is None:
        known = metadata.plans["sparse"] = _split(metadata, most, block_size, least_rows)
    return cast("SparseSplit", known)


def _split(metadata: AttentionMetadata, most: int, block_size: int, least_rows: int | None) -> SparseSplit:
    single, dense, prompts, first = list[int](), list[int](), list[PromptPlan](), 0
    for index, (count, length) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        if length <= most:
            dense.append(index)
        elif least_rows is not None and count >= least_rows and length < LONG_CONTEXT * most:
            own = metadata.select([index])[0]
            prompts.append(PromptPlan(first, first + count, own, context_slots(metadata, index, block_size)))
        else:
            single.append(index)
        first += count
    return SparseSplit(
        _single_plan(metadata, single, most) if single else None,
        tuple(prompts),
        metadata.select(dense) if dense else None,
    )


def _single_plan(metadata: AttentionMetadata, members: list[int], most: int) -> SinglePlan:
    device, rows = metadata.slot_mapping.device, None
    if len(members) < metadata.num_seqs:
        metadata, rows = metadata.select(members)
    lens = [
        min(position + 1, most)
        for count, length in zip(metadata.query_lens, metadata.kv_lens, strict=True)
        for position in range(length - count, length)
    ]
    return SinglePlan(
        metadata,
        rows,
        lens,
        torch.tensor(lens, dtype=torch.int32, device=device),
        torch.arange(len(lens) + 1, dtype=torch.int32, device=device),
    )


def over_slots(attention: Attention) -> Attention:
    """Return what attends over blocks of one token (KVCachePool.by_slot): this, or torch's where it cannot."""
    return attention if attention.takes_any_block else _ANY_BLOCKS


def context_slots(metadata: AttentionMetadata, index: int, block_size: int) -> Tensor:
    """Return the slots (C) of a sequence's context, made once for all layers."""
    known = metadata.plans.get(("slots", index))
    if known is None:
        position_C = torch.arange(metadata.kv_lens[index], device=metadata.slot_mapping.device)
        blocks_C = metadata.block_tables[index].long()[position_C // block_size]
        known = metadata.plans["slots", index] = blocks_C * block_size + position_C % block_size
    return cast("Tensor", known)
