"""Attention on a GPU: torch's FlashAttention over the paged pool itself (torch.nn.attention.varlen, torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.attention.base import Attention, AttentionLayer, AttentionMetadata
from penstock.generation.attention.sdpa import SDPAAttention

if TYPE_CHECKING:
    from penstock.generation.attention.kv_cache import KVCachePool

# gpu_operators.turn_and_write.
TurnAndWrite = Callable[[Tensor, Tensor, Tensor, AttentionLayer, Tensor, Tensor, Tensor], Tensor]
_INT32 = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class FlashLimits:
    """Inputs of the operator: those of FlashAttention-2, which torch has."""

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    max_head_dim: int = 256
    head_multiple: int = 8
    # Tokens of a block: its kernel loads whole tiles of a page.
    block_multiple: int = 256

    def fits(self, dtype: torch.dtype, head_dim: int) -> bool:
        """True for heads that the operator computes."""
        return dtype in self.dtypes and head_dim <= self.max_head_dim and head_dim % self.head_multiple == 0


class FlashAttention(Attention):
    """Attention by varlen_attn over block tables: prompts, chunks and decoding sequences in one call.

    It has no soft cap, no sinks and no int8 pool: such layers, and everything outside `limits`, go to torch's general
    operators. Nothing is read back from the device.
    """

    name = "flash"

    def __init__(self, limits: FlashLimits | None = None, *, turn_and_write: TurnAndWrite | None = None) -> None:
        """Take the operator's limits (None: those of torch's FlashAttention), and the operator that turns heads and
        writes them into the pool in one pass (None: torch's operators)."""
        self._limits = limits or FlashLimits()
        self._portable = SDPAAttention()
        self._turn_and_write = turn_and_write

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
        is_plain = not layer.norm_is_whole and self.can_be_captured(layer, qkv_TE.dtype, kv)
        if self._turn_and_write is None or not is_plain:
            return super().forward_qkv(qkv_TE, cos, sin, layer, metadata, kv)
        slots = metadata.slot_mapping
        q_THD = self._turn_and_write(qkv_TE, cos, sin, layer, kv.key(layer.index), kv.value(layer.index), slots)
        return self._attend(q_THD, layer, metadata, kv)

    def _attend(
        self,
        q_THD: Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        kv: KVCachePool,
    ) -> Tensor:
        """Return o_THD over the keys and values in the pool."""
        # Imported late: the module makes an operator of its own, useless in a process on the CPU.
        from torch.nn.attention.varlen import varlen_attn

        tables = metadata.block_tables
        longest = max(metadata.query_lens)
        # Tokens that are their sequences' last see all of them: without a mask, query heads of one key/value head are
        # the rows of one product.
        is_grouped = longest == 1 and layer.window is None and q_THD.shape[1] > kv.num_kv_heads
        out = varlen_attn(
            q_THD.contiguous(),
            kv.key(layer.index),
            kv.value(layer.index),
            metadata.query_start,
            # Wanted beside block tables, though lengths are those of seqused_k.
            metadata.query_start,
            longest,
            tables.shape[1] * kv.block_size,
            scale=layer.scale,
            # Positions before a row that it sees, and after it. The row itself is not counted.
            window_size=(-1, -1) if is_grouped else (-1 if layer.window is None else layer.window - 1, 0),
            enable_gqa=q_THD.shape[1] != kv.num_kv_heads,
            seqused_k=metadata.context_lens,
            block_table=tables,
            # torch 2.13 cuts contexts into parts, by the width of the tables, and gives wrong numbers, and writes
            # outside the result, for all but grouped rows (docs/guide/cuda.md). Others are not cut.
            num_splits=None if is_grouped else 1,
        )
        assert isinstance(out, Tensor)
        return out

    @override
    def can_be_captured(self, layer: AttentionLayer, dtype: torch.dtype, kv: KVCachePool) -> bool:
        return not layer.changes_scores and self._takes(dtype, layer.head_dim, kv)

    def _takes(self, dtype: torch.dtype, head_dim: int, kv: KVCachePool) -> bool:
        """True when the operator supports such heads, and its offsets reach all of a layer's pool."""
        if kv.dtype is not dtype or not self._limits.fits(dtype, head_dim):
            return False
        return kv.block_size % self._limits.block_multiple == 0 and kv.key(0).numel() <= _INT32
