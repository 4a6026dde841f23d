"""Reference attention on torch's scaled_dot_product_attention: portable torch, so far run on CPU.

Per step (not per layer) the sequences are split into groups that attend together: short queries (decode rows) of equal
length are padded to the longest context of their group, long queries go one sequence at a time. Masks and gather
indices are made once per distinct sliding window and kept in `metadata.plans`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.generation.attention.base import Attention, AttentionLayer, AttentionMetadata, softmax_with_sinks

if TYPE_CHECKING:
    from penstock.generation.attention.kv_cache import KVCachePool

# Queries up to this long are batched over sequences, with the heads that share a key/value head as further rows.
MAX_BATCHED_QUERY = 16
# A group never pads a sequence to more than twice its context, except below this number of tokens, where a further
# group would cost more than the padding.
SMALL_CONTEXT = 128

Rows: TypeAlias = "slice | Tensor"


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences attended in one call: N of them, each with `query_len` rows, over C gathered keys."""

    num_seqs: int
    query_len: int
    rows: Rows
    # (N * C) slots of the pool; None: the keys are exactly this step's rows of the one sequence.
    slots: Tensor | None
    # (N, 1, query_len, C) additive; None: plain causal.
    mask: Tensor | None
    # (N, C): positions of the keys, below 0 where there is none; None: those of the rows.
    positions: Tensor | None = None


class SDPAAttention(Attention):
    """Attention in groups, as the module's docstring says. Padding repeats the sequence's own newest key, masked: rows
    never read data that another sequence left in the pool."""

    name = "sdpa"
    takes_any_block = True

    @override
    def forward(
        self,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKD: Tensor | None,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        kv: KVCachePool,
    ) -> Tensor:
        if k_TKD is None or v_TKD is None:
            k_TKD, v_TKD = kv.read_stored(layer.index, metadata.slot_mapping, q_THD.dtype)
        else:
            k_TKD, v_TKD = kv.write(layer.index, metadata.slot_mapping, k_TKD, v_TKD)
        # Few rows are turned, in place of all keys and values.
        return kv.turned(self._attend_stored(kv.turned(q_THD), k_TKD, v_TKD, layer, metadata, kv))

    @staticmethod
    def _attend_stored(
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        kv: KVCachePool,
    ) -> Tensor:
        """Attend to keys and values as they are stored."""
        groups = _plan(metadata, layer.window, q_THD.dtype, q_THD.shape[1] // layer.num_kv_heads, kv.block_size)
        if layer.changes_scores:
            out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
            for group in groups:
                rows = group.rows
                out[rows] = _attend_by_scores(q_THD[rows], k_TKD[rows], v_TKD[rows], group, layer, kv)
            return out
        if len(groups) == 1:  # in order, by construction
            return _attend(q_THD, k_TKD, v_TKD, groups[0], layer, kv)
        out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for group in groups:
            rows = group.rows
            out[rows] = _attend(q_THD[rows], k_TKD[rows], v_TKD[rows], group, layer, kv)
        return out


def _attend(
    q_RHD: Tensor,
    k_RKD: Tensor,
    v_RKD: Tensor,
    group: Group,
    layer: AttentionLayer,
    kv: KVCachePool,
) -> Tensor:
    """Attention of one group's R = N * query_len rows."""
    num_rows, num_heads, head_dim = q_RHD.shape
    if group.slots is None:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_RHD, k_RKD, v_RKD))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1).reshape(num_rows, num_heads, head_dim)
    shape = (group.num_seqs, -1, layer.num_kv_heads, head_dim)
    k, v = (x.view(shape).transpose(1, 2) for x in kv.read_stored(layer.index, group.slots, q_RHD.dtype))
    if group.query_len > MAX_BATCHED_QUERY:
        q = q_RHD.view(group.num_seqs, group.query_len, num_heads, head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=layer.scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(num_rows, num_heads, head_dim)
    # The query heads of one key/value head become rows: keys are read once, and bf16 takes the blocked path.
    heads_per_kv = num_heads // layer.num_kv_heads
    grouped = (group.num_seqs, group.query_len, layer.num_kv_heads, heads_per_kv, head_dim)
    q = q_RHD.reshape(grouped).transpose(1, 2).flatten(2, 3)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=layer.scale)
    out = out.view(group.num_seqs, layer.num_kv_heads, group.query_len, heads_per_kv, head_dim)
    return out.transpose(1, 2).reshape(num_rows, num_heads, head_dim)


def _attend_by_scores(
    q_RHD: Tensor,
    k_RKD: Tensor,
    v_RKD: Tensor,
    group: Group,
    layer: AttentionLayer,
    kv: KVCachePool,
) -> Tensor:
    """Attention of one group's rows with changed scores, which torch's own operator does not support: in float32, the
    heads of one key/value head at a time."""
    num_rows, num_heads, head_dim = q_RHD.shape
    heads_per_kv = num_heads // layer.num_kv_heads
    if group.slots is None:
        keys, values = k_RKD, v_RKD
        visible = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q_RHD.device).tril()
        mask = torch.zeros(visible.shape, device=q_RHD.device).masked_fill_(~visible, float("-inf"))[None]
    else:
        keys, values = kv.read_stored(layer.index, group.slots, q_RHD.dtype)
        # The rows of a batched group's mask are (query, head of the group), all of a query the same.
        step = heads_per_kv if group.query_len <= MAX_BATCHED_QUERY else 1
        mask = cast("Tensor", group.mask)[:, 0, ::step].float()
    shape = (group.num_seqs, group.query_len, layer.num_kv_heads, heads_per_kv, head_dim)
    q_NQKGD = q_RHD.reshape(shape)
    k_NCKD, v_NCKD = (x.view(group.num_seqs, -1, layer.num_kv_heads, head_dim) for x in (keys, values))
    out = torch.empty_like(q_NQKGD)
    behind_NQC = _behind(group, q_RHD) if layer.slopes is not None else None
    for head in range(layer.num_kv_heads):
        q_GNQD = q_NQKGD[:, :, head].float().permute(2, 0, 1, 3)
        scores = torch.matmul(q_GNQD, k_NCKD[:, :, head].float().transpose(1, 2)) * layer.scale
        if layer.softcap:
            scores = layer.softcap * (scores / layer.softcap).tanh_()
        own_heads = slice(head * heads_per_kv, (head + 1) * heads_per_kv)
        if layer.slopes is not None and behind_NQC is not None:
            scores += layer.slopes[own_heads].view(-1, 1, 1, 1) * behind_NQC
        scores += mask
        own = None if layer.sinks is None else layer.sinks[own_heads]
        weighted = torch.matmul(softmax_with_sinks(scores, own), v_NCKD[:, :, head].float())
        out[:, :, head] = weighted.permute(1, 2, 0, 3).to(out.dtype)
    return out.view(num_rows, num_heads, head_dim)


def _behind(group: Group, rows: Tensor) -> Tensor:
    """Return the positions (N, query_len, C) of the keys from each row's own on: small numbers, for small errors."""
    positions_NC = torch.arange(len(rows), device=rows.device)[None] if group.positions is None else group.positions
    return positions_NC[:, None] - positions_NC[:, -group.query_len :, None]


def _plan(
    metadata: AttentionMetadata, sliding_window: int | None, dtype: torch.dtype, heads_per_kv: int, block_size: int
) -> list[Group]:
    key = ("sdpa", sliding_window, dtype)
    plan = metadata.plans.get(key)
    if plan is None:
        groups = [
            _group(metadata, members, sliding_window, dtype, heads_per_kv, block_size)
            for members in _partition(metadata, sliding_window)
        ]
        plan = metadata.plans[key] = groups
    return cast("list[Group]", plan)


def _span(kv_len: int, query_len: int, sliding_window: int | None) -> int:
    """Number of newest context positions that any of the rows may see."""
    return kv_len if sliding_window is None else min(kv_len, sliding_window + query_len - 1)


def _partition(metadata: AttentionMetadata, sliding_window: int | None) -> list[list[int]]:
    """Return the indices of the sequences of each group, in ascending order; a single group holds all."""
    groups: list[list[int]] = []
    batched: dict[int, list[tuple[int, int]]] = {}
    for index, (query_len, kv_len) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        if query_len > MAX_BATCHED_QUERY:
            groups.append([index])
        else:
            batched.setdefault(query_len, []).append((_span(kv_len, query_len, sliding_window), index))
    for members in batched.values():
        members.sort(reverse=True)
        longest = 0
        for span, index in members:
            if not longest or (longest > SMALL_CONTEXT and span * 2 < longest):
                groups.append([])
                longest = span
            groups[-1].append(index)
    return [sorted(group) for group in groups]


def _group(
    metadata: AttentionMetadata,
    members: list[int],
    sliding_window: int | None,
    dtype: torch.dtype,
    heads_per_kv: int,
    block_size: int,
) -> Group:
    query_len = metadata.query_lens[members[0]]
    rows = _rows(metadata, members, query_len)
    kv_len = metadata.kv_lens[members[0]]
    if len(members) == 1 and kv_len == query_len and (sliding_window is None or kv_len <= sliding_window):
        return Group(1, query_len, rows, None, None)
    device = metadata.slot_mapping.device
    index_N = torch.tensor(members, device=device)
    length_N1 = metadata.context_lens[index_N].long().unsqueeze(1)
    span = max(_span(metadata.kv_lens[i], query_len, sliding_window) for i in members)
    # Aligned at the newest token, so that a window's keys are the last ones; positions before 0 are masked.
    position_NC = length_N1 - span + torch.arange(span, device=device)
    query_NQ = length_N1 - query_len + torch.arange(query_len, device=device)
    visible = (position_NC.unsqueeze(1) <= query_NQ.unsqueeze(2)) & (position_NC >= 0).unsqueeze(1)
    if sliding_window is not None:
        visible &= position_NC.unsqueeze(1) > query_NQ.unsqueeze(2) - sliding_window
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf")).unsqueeze(1)
    if query_len <= MAX_BATCHED_QUERY:
        mask = mask.repeat_interleave(heads_per_kv, dim=2)
    source_NC = torch.where(position_NC >= 0, position_NC, length_N1 - 1)
    blocks_NC = metadata.block_tables[index_N].long().gather(1, source_NC // block_size)
    slots = (blocks_NC * block_size + source_NC % block_size).flatten()
    return Group(len(members), query_len, rows, slots, mask, position_NC)


def _rows(metadata: AttentionMetadata, members: list[int], query_len: int) -> Rows:
    """Return the group's rows: a slice if they are adjacent, else their indices."""
    starts = [0]
    for length in metadata.query_lens:
        starts.append(starts[-1] + length)
    first, last = starts[members[0]], starts[members[-1]] + query_len
    if last - first == len(members) * query_len:
        return slice(first, last)
    device = metadata.slot_mapping.device
    start_N1 = torch.tensor([starts[i] for i in members], device=device).unsqueeze(1)
    return (start_N1 + torch.arange(query_len, device=device)).flatten()
