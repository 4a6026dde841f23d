"""Attention by the C++ kernels: rotary embedding and KV write in one pass, then attention over the pool itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.generation.attention.base import Attention, AttentionMetadata

if TYPE_CHECKING:
    from penstock.generation.attention.base import HeadWeights
    from penstock.generation.attention.kv_cache import KVCachePool


class NativeAttention(Attention):
    """Attention by csrc/attention, in float32 and bfloat16, head_dim up to 256; nothing is gathered or padded.

    A row's result is the same to the last bit in any step: alone or in a batch, in a decode step or in a chunk of any
    size, with its context in any blocks.
    """

    name = "native"
    # The bound of csrc/attention/attention.h.
    MAX_HEAD_DIM = 256
    # Tiles of 64 keys begin at multiples of 64.
    reads_behind = 63

    def forward(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        layer: int,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        scale: float,
        sliding_window: int | None,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See Attention.forward."""
        kv.write(layer, metadata.slot_mapping, k_TKD, v_TKD)
        return self._attend(q_THD, layer, metadata, kv, scale, sliding_window, softcap, sinks)

    def forward_qkv(
        self,
        qkv_TE: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: HeadWeights,
        layer: int,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """See Attention.forward_qkv."""
        if heads.norm_is_whole:
            heads = heads.whole_norms(qkv_TE)
        keys, values = kv.key(layer), kv.value(layer)
        q_THD: Tensor = torch.ops.penstock.rope_and_cache(
            qkv_TE,
            cos,
            sin,
            keys,
            values,
            kv.key_scale(layer),
            kv.value_scale(layer),
            metadata.slot_mapping,
            heads.num_heads,
            heads.q_norm,
            heads.k_norm,
            heads.eps,
        )
        return self._attend(q_THD, layer, metadata, kv, scale, sliding_window, heads.softcap, heads.sinks)

    @staticmethod
    def _attend(
        q_THD: Tensor,
        layer: int,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        scale: float,
        sliding_window: int | None,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        out: Tensor = torch.ops.penstock.paged_attention(
            q_THD,
            kv.key(layer),
            kv.value(layer),
            kv.key_scale(layer),
            kv.value_scale(layer),
            metadata.block_tables,
            metadata.query_start,
            metadata.context_lens,
            scale,
            sliding_window or 0,
            softcap,
            sinks,
        )
        return out
