"""Attention's view of one step's rows, and the contract of an attention implementation.

Shape suffixes used in this package: T rows (tokens of this step), S sequences, H query heads, K key/value heads,
D head dim, N sequences of one group, C keys (context positions).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.generation.attention.to_device import uploaded

if TYPE_CHECKING:
    from penstock.generation.attention.kv_cache import KVCachePool


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """The rows of one step: sequence s owns rows [query_start[s], query_start[s + 1]), its newest tokens.

    Tensors are on the model's device; lists and ints are copies on the host, so that no implementation has to read them
    back.
    """

    # (S + 1) int32: cumulative rows.
    query_start: Tensor
    # (S) int32: KV length of each sequence, the rows of this step included.
    context_lens: Tensor
    # (S, blocks of the longest) int32: ids of blocks in the pool; entries past a sequence's length are never used.
    block_tables: Tensor
    # (T) int64: block id * block size + offset, where each row's k and v go. No slot twice.
    slot_mapping: Tensor
    query_lens: list[int]
    kv_lens: list[int]
    max_context_len: int
    # Values that implementations derive once per step and use in every layer (masks, gather indices), under their own
    # keys.
    plans: dict[Hashable, object] = field(default_factory=dict, repr=False)
    # Slot of each sequence in the pool of states; None: the model has none.
    state_slots: tuple[int, ...] | None = None
    # Rows of each sequence that its state is kept after; later ones may be taken back. None: all of them.
    state_kept: tuple[int, ...] | None = None
    # Rows of an earlier step that each sequence's state goes through before its own ones. None: there are none.
    state_behind: tuple[int, ...] | None = None
    # Tables (V, S, blocks) and slots (V, T) of all views, where layers have blocks of their own (CacheLayout). Those
    # above are of the first view.
    view_tables: Tensor | None = None
    view_slots: Tensor | None = None

    @property
    def revises_states(self) -> bool:
        """True when states go through rows of an earlier step, or may be taken back to some row of this one."""
        return self.state_behind is not None or self.state_kept is not None

    @property
    def num_seqs(self) -> int:
        """Number of sequences, S."""
        return len(self.query_lens)

    @property
    def num_rows(self) -> int:
        """Number of rows, T."""
        return int(self.slot_mapping.shape[0])

    def view(self, number: int) -> AttentionMetadata:
        """Return the same rows with the tables and slots of a view: see KVCachePool.view_of."""
        if self.view_tables is None or self.view_slots is None:
            if number:
                raise ValueError("layers with blocks of their own need tables of their own")
            return self
        known = self.plans.get(("view", number))
        if not isinstance(known, AttentionMetadata):
            known = self.plans["view", number] = replace(
                self,
                block_tables=self.view_tables[number],
                slot_mapping=self.view_slots[number],
                plans={},
                view_tables=None,
                view_slots=None,
            )
        return known

    def select(self, members: list[int]) -> tuple[AttentionMetadata, Tensor]:
        """Return the metadata of some sequences only, in order, and their rows (T')."""
        starts = np.concatenate(([0], np.cumsum(self.query_lens)))
        rows = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in members])
        query_lens = [self.query_lens[index] for index in members]
        kv_lens = [self.kv_lens[index] for index in members]
        device = self.slot_mapping.device
        rows_T = torch.from_numpy(rows).to(device)
        members_S = torch.tensor(members, device=device)
        query_start = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        part = AttentionMetadata(
            query_start=torch.from_numpy(query_start).to(device),
            context_lens=self.context_lens[members_S],
            block_tables=self.block_tables[members_S],
            slot_mapping=self.slot_mapping[rows_T],
            query_lens=query_lens,
            kv_lens=kv_lens,
            max_context_len=max(kv_lens),
            state_slots=None if self.state_slots is None else tuple(self.state_slots[index] for index in members),
        )
        return part, rows_T

    def tokens(self) -> Iterator[AttentionMetadata]:
        """Yield the metadata of the sequences' first rows, then of the second ones, and so on: all have as many."""
        count, num_seqs = self.query_lens[0], self.num_seqs
        query_start = torch.arange(num_seqs + 1, dtype=torch.int32, device=self.query_start.device)
        for row in range(count):
            left = count - row - 1
            yield replace(
                self,
                query_start=query_start,
                context_lens=self.context_lens - left,
                slot_mapping=self.slot_mapping[row::count],
                query_lens=[1] * num_seqs,
                kv_lens=[length - left for length in self.kv_lens],
                max_context_len=self.max_context_len - left,
                plans={},
            )

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        block_tables: Tensor,
        block_size: int,
        device: torch.device | None = None,
    ) -> tuple[AttentionMetadata, Tensor]:
        """Derive everything from lengths and block tables; also returns positions (T) int64, all on `device`.

        `block_tables` (S, max blocks), or (V, S, max blocks) of several views, int32, is on the host, where numpy
        derives everything: a dozen torch operators take longer for such small arrays, and would be a noticeable part of
        a decode step of one sequence. Raises ValueError when lengths contradict each other: a wrong table would write
        into another sequence's blocks.
        """
        _check(query_lens, kv_lens, block_tables, block_size)
        starts = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        # (T): the row's sequence, position and slot.
        row_seq = np.repeat(np.arange(len(query_lens)), query_lens)
        first_position = np.subtract(kv_lens, query_lens) - starts[:-1]
        positions = np.arange(starts[-1]) + first_position[row_seq]
        index, offset = np.divmod(positions, block_size)
        slots = block_tables.numpy()[..., row_seq, index].astype(np.int64, order="C") * block_size + offset

        def moved(values: np.ndarray) -> Tensor:
            return uploaded(values, device or block_tables.device)

        tables, places = moved(block_tables.numpy()), moved(slots)
        has_views = tables.dim() == 3
        metadata = cls(
            query_start=moved(starts),
            context_lens=moved(np.array(kv_lens, dtype=np.int32)),
            block_tables=tables[0] if has_views else tables,
            slot_mapping=places[0] if has_views else places,
            view_tables=tables if has_views else None,
            view_slots=places if has_views else None,
            query_lens=list(query_lens),
            kv_lens=list(kv_lens),
            max_context_len=max(kv_lens),
        )
        return metadata, moved(positions)


def _check(query_lens: Sequence[int], kv_lens: Sequence[int], block_tables: Tensor, block_size: int) -> None:
    if not query_lens or not len(query_lens) == len(kv_lens) == block_tables.shape[-2]:
        raise ValueError("query_lens, kv_lens and block_tables must describe the same, at least one, sequences")
    if min(query_lens) < 1 or any(kv < q for q, kv in zip(query_lens, kv_lens, strict=True)):
        raise ValueError("every sequence needs 1 <= query_len <= kv_len")
    if max(kv_lens) > block_tables.shape[-1] * block_size:
        raise ValueError("block_tables hold fewer slots than the longest kv_len")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """Facts of one layer's attention, bound when the model is loaded: a step's call adds what changes with the step.

    The first three are the split of the fused qkv projection's outputs.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Factor of the products of q and k.
    scale: float
    # Number of the layer in the pool.
    index: int = 0
    # Number of positions that a row sees, itself included; None: all.
    window: int | None = None
    _: KW_ONLY
    # (D) each, or with `norm_is_whole`, over all heads of a row together, (H * D) and (K * D); None without. A norm in
    # float32 is multiplied before its result is rounded to a narrower dtype.
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    norm_is_whole: bool = False
    # Scores s become softcap * tanh(s / softcap); 0: they stay.
    softcap: float = 0.0
    # (H) float32: a sink of each head, a score that takes weight and has no value.
    sinks: Tensor | None = None
    # (H) float32: scores of a key get slope * its position, from the row's own on (ALiBi).
    slopes: Tensor | None = None
    # Dims of the outputs that are read, the first ones; an implementation may leave out the others. 0: all.
    value_dim: int = 0
    # Values are normed, without a weight.
    norms_values: bool = False
    # The fused projection has no values: they are its keys, before norm and turn.
    values_are_keys: bool = False
    # The fused projection has queries alone: another layer wrote the keys and values that this one reads.
    reads_only: bool = False
    # This layer without norms, for rows that were normed over all heads; None: it does not norm so.
    _unnormed: AttentionLayer | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.norm_is_whole:
            # Once, and not in each step.
            unnormed = replace(self, q_norm=None, k_norm=None, norm_is_whole=False)
            object.__setattr__(self, "_unnormed", unnormed)

    @property
    def changes_scores(self) -> bool:
        """True where scores have a soft cap, sinks or slopes, which few operators know."""
        return bool(self.softcap) or self.sinks is not None or self.slopes is not None

    @property
    def parts(self) -> int:
        """Number of parts of the fused projection: queries, keys and values; without values; queries alone."""
        return 1 if self.reads_only else 2 if self.values_are_keys else 3

    def whole_norms(self, qkv_TE: Tensor) -> AttentionLayer:
        """Norm q and k over all their heads, in place. Return this layer without norms."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        assert self._unnormed is not None
        query, kv = len(self.q_norm), len(self.k_norm)
        for part_TE, weight in ((qkv_TE[:, :query], self.q_norm), (qkv_TE[:, query : query + kv], self.k_norm)):
            part_TE.copy_(F.rms_norm(part_TE.float(), weight.shape, weight, self.eps))
        return self._unnormed


def turned(
    qkv_TE: Tensor, cos: Tensor, sin: Tensor, layer: AttentionLayer
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return q (T, H, D), k and v (T, K, D) of the fused projection: split, normed, q and k turned. A layer that only
    reads has no k and v."""
    if layer.norm_is_whole:
        qkv_TE = qkv_TE.clone()
        layer = layer.whole_norms(qkv_TE)
    num_turned = layer.num_heads + (0 if layer.reads_only else layer.num_kv_heads)
    qkv = qkv_TE.view(qkv_TE.shape[0], -1, layer.head_dim)
    qk, v = qkv[:, :num_turned], qkv[:, -layer.num_kv_heads :]
    if layer.q_norm is not None:
        weights = [layer.q_norm.expand(layer.num_heads, -1)]
        if layer.k_norm is not None:
            weights.append(layer.k_norm.expand(layer.num_kv_heads, -1))
        qk = qk.to(layer.q_norm.dtype)
        qk = (F.rms_norm(qk, (layer.head_dim,), None, layer.eps) * torch.cat(weights)).to(qkv_TE.dtype)
    qk = rotate(qk, cos, sin)
    if layer.reads_only:
        return qk, None, None
    if layer.norms_values:
        v = F.rms_norm(v.float(), (layer.head_dim,), None, layer.eps).to(qkv_TE.dtype)
    return qk[:, : layer.num_heads], qk[:, layer.num_heads :], v


class Attention(ABC):
    """Causal attention over the paged pool. Stateless: one instance serves every layer and step."""

    name: str
    # Most positions before its window that a row reads: from a multiple of one more on. They take no weight, but must
    # hold numbers.
    reads_behind = 0
    # It must get all rows' queries: it looks at them.
    sees_queries = False
    # It attends over blocks of any size, of one token, too.
    takes_any_block = False

    def can_be_captured(self, layer: AttentionLayer, dtype: torch.dtype, kv: KVCachePool) -> bool:
        """True when `forward_qkv` of decoding sequences in this layer queues the same work in every step.

        It then reads only the tensors and the number of rows of `metadata`, and `kv_lens` on a device with graphs that
        get them anew in every step (GraphCapture.needs_lengths)."""
        return False

    @abstractmethod
    def forward(
        self,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKD: Tensor | None,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        kv: KVCachePool,
    ) -> Tensor:
        """Write k and v at `slot_mapping` of `layer`, then attend; returns o_THD in q's dtype, or its first
        `value_dim` dims. Without k and v they are there already.

        Everything is written before any row attends: a sequence may share blocks that another one's rows fill in this
        step. A row at position p sees positions [max(0, p - window + 1), p] of its own sequence (transformers 5.x).
        Mutates the pool's layer at `slot_mapping` and `metadata.plans`, nothing else.
        """

    def forward_qkv(
        self,
        qkv_TE: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        kv: KVCachePool,
    ) -> Tensor:
        """Split, norm and turn the fused projection by cos and sin (T, 1, D / 2), then attend as `forward`; returns
        o_THD."""
        q, k, v = turned(qkv_TE, cos, sin, layer)
        return self.forward(q, k, v, layer, metadata, kv)


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x turned by its positions' angles (half rotation), as a new contiguous tensor."""
    half = x_THD.shape[-1] // 2
    first, second = x_THD[..., :half], x_THD[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def softmax_with_sinks(scores_HX: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over the last dimension of (heads, ..., keys) in float32, as if each head had one more key
    with its sink as the score."""
    if sinks is None:
        return scores_HX.softmax(-1)
    shape = (*scores_HX.shape[:-1], 1)
    column = sinks.view(-1, *(1,) * (scores_HX.dim() - 1)).expand(shape)
    return torch.cat((scores_HX, column), dim=-1).softmax(-1)[..., :-1]
