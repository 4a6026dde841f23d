"""Attention by the C++ kernels: rotary embedding and KV write in one pass, then attention over the pool itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.attention.base import Attention, AttentionMetadata

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionLayer
    from penstock.generation.attention.kv_cache import KVCachePool


class NativeAttention(Attention):
    """Attention by csrc/attention, in float32 and bfloat16, head_dim up to 576; nothing is gathered or padded.

    A row's result is the same to the last bit in any step: alone or in a batch, in a decode step or in a chunk of any
    size, with its context in any blocks.
    """

    name = "native"
    # The bound of csrc/attention/attention.h.
    MAX_HEAD_DIM = 576
    # Tiles of 64 keys begin at multiples of 64.
    reads_behind = 63
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
        if k_TKD is not None and v_TKD is not None:
            kv.write(layer.index, metadata.slot_mapping, k_TKD, v_TKD)
        return self._attend(q_THD, layer, metadata, kv)

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
        if layer.norm_is_whole:
            layer = layer.whole_norms(qkv_TE)
        keys, values = kv.key(layer.index), kv.value(layer.index)
        q_THD: Tensor = torch.ops.penstock.rope_and_cache(
            qkv_TE,
            cos,
            sin,
            keys,
            values,
            kv.key_scale(layer.index),
            kv.value_scale(layer.index),
            metadata.slot_mapping,
            layer.num_heads,
            layer.q_norm,
            layer.k_norm,
            layer.eps,
            layer.parts,
            layer.norms_values,
        )
        return self._attend(q_THD, layer, metadata, kv)

    @staticmethod
    def _attend(
        q_THD: Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        kv: KVCachePool,
    ) -> Tensor:
        out: Tensor = torch.ops.penstock.paged_attention(
            q_THD,
            kv.key(layer.index),
            kv.value(layer.index),
            kv.key_scale(layer.index),
            kv.value_scale(layer.index),
            metadata.block_tables,
            metadata.query_start,
            metadata.context_lens,
            layer.scale,
            layer.window or 0,
            layer.softcap,
            layer.sinks,
            layer.value_dim,
            layer.slopes,
        )
        return out
