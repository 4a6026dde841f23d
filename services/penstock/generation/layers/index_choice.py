"""The choice of positions by an indexer's queries and the index keys in the pool: by torch's operators, or by the C++
kernels.

As in transformers, scores are in float32 over keys of the model's dtype. Of equal scores the first positions are
chosen. Many scores are exactly 0: those of positions with no product above 0. torch.topk, which transformers calls,
chooses among equals by the number and order of all scores, so it would depend on a prompt's cuts and on padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.generation.attention.chosen_rows import context_slots

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionMetadata
    from penstock.generation.attention.chosen_rows import PromptPlan, SinglePlan
    from penstock.generation.attention.kv_cache import KVCachePool

# Products of heads at once: those of a large step over a long context would take gigabytes.
_MOST_PRODUCTS = 1 << 24
# Scores at once, for the same reason.
_MOST_SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """Queries of an indexer's heads (T, heads, dim), and the heads' weights (T, heads) in float32."""

    q_THD: Tensor
    weight_TH: Tensor

    def select(self, rows: slice) -> IndexQueries:
        """Return those of some rows."""
        return IndexQueries(self.q_THD[rows], self.weight_TH[rows])


class IndexChoice:
    """The choice by torch's operators."""

    def of_singles(self, queries: IndexQueries, place: int, plan: SinglePlan, kv: KVCachePool, most: int) -> Tensor:
        """Return the slots (T', most) int32 that the rows of a plan read, in the order of positions; `place`: number of
        the layer among those with index keys. A row with fewer positions reads the first ones of its slots."""
        metadata, found, first = plan.metadata, list[Tensor](), 0
        for index, count in enumerate(metadata.query_lens):
            slots_C = context_slots(metadata, index, kv.block_size)
            # A sequence at a time: its scores are the same alone and in a batch.
            own = queries.select(slice(first, first + count))
            found.append(slots_C[chosen_positions(own, kv.read_index(place, slots_C), most)])
            first += count
        return torch.cat(found).to(torch.int32)

    def of_prompt(self, queries: IndexQueries, place: int, plan: PromptPlan, kv: KVCachePool, most: int) -> Tensor:
        """Return the positions (T, most) int64 that the rows of a prompt read. Where a row has fewer before it, its own
        position stands for the missing ones."""
        return chosen_positions(queries, kv.read_index(place, plan.slots_C), most)


class NativeIndexChoice(IndexChoice):
    """The choice by the kernels: a row's has the same bits in any step."""

    # The bound of csrc/attention/index_scores.h.
    MAX_DIM = 256

    @override
    def of_singles(self, queries: IndexQueries, place: int, plan: SinglePlan, kv: KVCachePool, most: int) -> Tensor:
        if kv.index_key(place).shape[-1] > self.MAX_DIM:
            return super().of_singles(queries, place, plan, kv, most)
        return _by_kernels(queries, kv.index_key(place), plan.metadata, most, gives_slots=True)

    @override
    def of_prompt(self, queries: IndexQueries, place: int, plan: PromptPlan, kv: KVCachePool, most: int) -> Tensor:
        if kv.index_key(place).shape[-1] > self.MAX_DIM:
            return super().of_prompt(queries, place, plan, kv, most)
        return _by_kernels(queries, kv.index_key(place), plan.metadata, most, gives_slots=False).long()


def _by_kernels(
    queries: IndexQueries, keys: Tensor, metadata: AttentionMetadata, most: int, *, gives_slots: bool
) -> Tensor:
    """Return the positions (T, most) int32 that the rows of `metadata` read, or their slots."""
    found: Tensor = torch.ops.penstock.index_choice(
        queries.q_THD,
        queries.weight_TH,
        keys,
        metadata.block_tables,
        metadata.query_start,
        metadata.context_lens,
        metadata.max_context_len,
        most,
        gives_slots,
    )
    return found


def chosen_positions(queries: IndexQueries, key_CD: Tensor, most: int) -> Tensor:
    """Return the positions (T, most) that the last T rows of C positions read, ascending. `most` is at most C. Where a
    row has fewer before it, its own position stands for the missing ones."""
    count, length = len(queries.q_THD), len(key_CD)
    each, found = max(1, _MOST_SCORES // length), list[Tensor]()
    for first in range(0, count, each):
        last = min(first + each, count)
        # Nothing behind a row is read.
        seen = length - count + last
        scores_TC = index_scores(queries.select(slice(first, last)), key_CD[:seen])
        if seen < most:
            scores_TC = F.pad(scores_TC, (0, most - seen), value=-torch.inf)
        found.append(best_positions(scores_TC, most))
    position_TK = found[0] if len(found) == 1 else torch.cat(found)
    if count > 1:
        own_T1 = torch.arange(length - count, length, device=key_CD.device).unsqueeze(1)
        position_TK = torch.minimum(position_TK, own_T1)
    return position_TK


def index_scores(queries: IndexQueries, key_CD: Tensor) -> Tensor:
    """Return the scores (T, C) in float32 of C positions, the last T of them the rows' own; minus infinity behind a
    row. NaN becomes infinity: such a position is chosen, and its row shows it."""
    count, length = len(queries.q_THD), len(key_CD)
    key_DC = key_CD.float().t()
    scores_TC = queries.weight_TH.new_empty((count, length))
    each = max(1, _MOST_PRODUCTS // (length * queries.q_THD.shape[1]))
    for first in range(0, count, each):
        part = queries.select(slice(first, first + each))
        products_THC = torch.matmul(part.q_THD.float(), key_DC).relu_()
        scores_TC[first : first + each] = torch.matmul(part.weight_TH.unsqueeze(1), products_THC).squeeze(1)
    scores_TC.nan_to_num_(torch.inf, torch.inf, -torch.inf)
    if count > 1:
        position_C = torch.arange(length, device=key_CD.device)
        scores_TC.masked_fill_(position_C > position_C[length - count :, None], -torch.inf)
    return scores_TC


def best_positions(scores_TC: Tensor, most: int) -> Tensor:
    """Return the positions (T, most) of the highest scores of each row, ascending; of equal scores the first ones."""
    least_T1 = scores_TC.topk(most, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_TC, equal_TC = scores_TC > least_T1, scores_TC == least_T1
    missing_T1 = most - above_TC.sum(-1, keepdim=True)
    chosen_TC = above_TC | (equal_TC & (equal_TC.cumsum(-1) <= missing_T1))
    return chosen_TC.nonzero()[:, 1].view(-1, most)
