"""Attention on an Ascend NPU: torch-npu's fused operators over the paged pool itself."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.attention.base import Attention, AttentionMetadata
from penstock.generation.attention.npu_operators import (
    AttentionLimits,
    PagedCall,
    causal_mask,
    check_rotary,
    check_scatter,
    rms_norm,
    rotary_mul,
    scatter,
)
from penstock.generation.attention.sdpa import SDPAAttention

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionLayer
    from penstock.generation.attention.kv_cache import KVCachePool


class NPUAttention(Attention):
    """Attention by npu_fused_infer_attention_score, in layout TND over block tables: prompts, chunks and decoding
    sequences in one call.

    The operator has no soft cap, no sinks in the sense of these models, and no scales of this pool's int8: such layers,
    and everything outside `limits`, go to torch's operators. The first layer of a step makes and checks the values that
    all its layers share.
    """

    name = "npu"

    def __init__(self, limits: AttentionLimits | None = None) -> None:
        """Take the operator's limits; None: those of an NPU."""
        self._limits = limits or AttentionLimits()
        self._portable = SDPAAttention()
        self._mask: Tensor | None = None

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
        # Layers that only read have torch's operators (models.loader.attention_of).
        assert k_TKD is not None
        assert v_TKD is not None
        if layer.changes_scores or not self._takes(q_THD.dtype, q_THD.shape[2], kv):
            return self._portable.forward(q_THD, k_TKD, v_TKD, layer, metadata, kv)
        keys, values = kv.key(layer.index), kv.value(layer.index)
        q_THD = q_THD.contiguous()
        key = ("npu", layer.window)
        call = cast("PagedCall | None", metadata.plans.get(key))
        if call is None:
            check_scatter(k_TKD, v_TKD, keys, values, metadata.slot_mapping)
            call = self._call(metadata, layer.window)
            call.check(q_THD, keys, values, self._limits)
            metadata.plans[key] = call
        scatter(k_TKD, v_TKD, keys, values, metadata.slot_mapping)
        return call.attend(q_THD, keys, values, layer.scale)

    @override
    def can_be_captured(self, layer: AttentionLayer, dtype: torch.dtype, kv: KVCachePool) -> bool:
        return not layer.changes_scores and self._takes(dtype, layer.head_dim, kv)

    def _takes(self, dtype: torch.dtype, head_dim: int, kv: KVCachePool) -> bool:
        return kv.dtype is dtype and self._limits.fits(dtype, head_dim)

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
        is_mixed = layer.q_norm is not None and layer.q_norm.dtype is not qkv_TE.dtype
        if layer.norm_is_whole or is_mixed:
            return super().forward_qkv(qkv_TE, cos, sin, layer, metadata, kv)
        num_turned = layer.num_heads + layer.num_kv_heads
        qkv = qkv_TE.view(len(qkv_TE), num_turned + layer.num_kv_heads, layer.head_dim)
        q, k, v = qkv[:, : layer.num_heads], qkv[:, layer.num_heads : num_turned], qkv[:, num_turned:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, layer.eps), rms_norm(k, layer.k_norm, layer.eps)
        cos, sin = _both_halves(q, cos, sin, metadata)
        q, k = rotary_mul(q, cos, sin), rotary_mul(k, cos, sin)
        return self.forward(q, k, v, layer, metadata, kv)

    def _call(self, metadata: AttentionMetadata, window: int | None) -> PagedCall:
        device = metadata.block_tables.device
        if self._mask is None or self._mask.device != device:
            self._mask = causal_mask(device)
        ends = list(accumulate(metadata.query_lens))
        return PagedCall(ends, metadata.kv_lens, metadata.block_tables, self._mask, window)


def _both_halves(x_THD: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
    """Return cos and sin (1, T, 1, D) of (T, 1, D / 2), made once a step for each rotary embedding of the model."""
    key = ("npu", "turn", id(cos))
    found = cast("tuple[Tensor, Tensor, Tensor] | None", metadata.plans.get(key))
    if found is None:
        whole_cos, whole_sin = (torch.cat((half, half), -1).unsqueeze(0) for half in (cos, sin))
        check_rotary(x_THD, whole_cos, whole_sin)
        # The half is kept, so that no other tensor of this step gets its id.
        found = metadata.plans[key] = (whole_cos, whole_sin, cos)
    return found[0], found[1]
