"""Attention weights of chosen rows, computed in addition to the attention itself from the keys in the paged pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.attention.base import (
    Attention,
    AttentionLayer,
    AttentionMetadata,
    softmax_with_sinks,
    turned,
)

if TYPE_CHECKING:
    from penstock.generation.attention.kv_cache import KVCachePool


@dataclass(frozen=True, slots=True)
class KeptRow:
    """A row of the step: the newest of `context` tokens of sequence `index` of the metadata."""

    row: int
    index: int
    context: int


class AttentionKeeper(Attention):
    """Attention of one step by another implementation, which also keeps softmax(q k) of the chosen rows.

    Attention itself never has these weights as a whole, so this class computes them, once per layer and row.
    """

    name = "keeper"
    sees_queries = True

    def __init__(self, inner: Attention, rows: Sequence[KeptRow]) -> None:
        self._inner = inner
        self._rows = rows
        # Slots of the rows' keys, for the view that a layer has.
        self._slots: dict[int, list[Tensor]] = {}
        # Per row: (heads, context) fp32 of every layer so far.
        self._weights: list[list[Tensor]] = [[] for _ in rows]

    def weights(self, place: int) -> Tensor:
        """Return (layers, heads, context) in fp32 of the row at `place`, after the forward pass; 0 outside a sliding
        window."""
        return torch.stack(self._weights[place])

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
        out = self._inner.forward(q_THD, k_TKD, v_TKD, layer, metadata, kv)
        rows = [one.row for one in self._rows]
        self._keep(q_THD[rows], layer, metadata, kv)
        return out

    @override
    def forward_qkv(
        self,
        qkv_TE: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        kv: KVCachePool,
    ) -> Tensor:
        """The result has the inner implementation's own bits, so other rows keep theirs."""
        rows = [one.row for one in self._rows]
        # Before the inner implementation, which may norm the projection in place.
        q_RHD, _, _ = turned(qkv_TE[rows], cos[rows], sin[rows], layer)
        out = self._inner.forward_qkv(qkv_TE, cos, sin, layer, metadata, kv)
        self._keep(q_RHD, layer, metadata, kv)
        return out

    def _keep(
        self,
        q_RHD: Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        kv: KVCachePool,
    ) -> None:
        """Keep the weights of the chosen rows' queries over the keys, which are in the pool by now."""
        view = kv.view_of(layer.index)
        if view not in self._slots:
            self._slots[view] = [_slots(one, metadata, kv.block_size) for one in self._rows]
        for one, q_HD, slots_C, found in zip(self._rows, q_RHD, self._slots[view], self._weights, strict=True):
            k_CKD = kv.read(layer.index, slots_C, torch.float32)[0].float()
            # The query heads that share a key/value head are neighbours.
            q_KGD = q_HD.float().view(layer.num_kv_heads, -1, layer.head_dim)
            scores_KGC = torch.einsum("kgd,ckd->kgc", q_KGD, k_CKD) * layer.scale
            if layer.softcap:
                scores_KGC = layer.softcap * (scores_KGC / layer.softcap).tanh_()
            if layer.slopes is not None:
                behind_C = torch.arange(1 - one.context, 1, device=scores_KGC.device)
                scores_KGC += layer.slopes.view(*scores_KGC.shape[:2], 1) * behind_C
            if layer.window is not None and one.context > layer.window:
                scores_KGC[:, :, : one.context - layer.window] = -torch.inf
            found.append(softmax_with_sinks(scores_KGC.flatten(0, 1), layer.sinks))


def _slots(one: KeptRow, metadata: AttentionMetadata, block_size: int) -> Tensor:
    """Return the slots (context) of the row's keys in the pool."""
    blocks = metadata.block_tables[one.index, : -(-one.context // block_size)].long()
    within = torch.arange(block_size, device=blocks.device)
    return (blocks[:, None] * block_size + within).flatten()[: one.context]
