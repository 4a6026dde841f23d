"""Attention on a GPU: torch's FlashAttention over the paged pool itself (torch.nn.attention.varlen, torch 2.13)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.generation.attention.base import Attention, AttentionMetadata, HeadWeights
from penstock.generation.attention.sdpa import SDPAAttention

if TYPE_CHECKING:
    from penstock.generation.attention.kv_cache import KVCachePool

_INT32 = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class FlashLimits:
    """Inputs that the operator takes: FlashAttention-2's, which is the one in torch."""

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

    It has no soft cap, no sinks and no int8 pool: such layers go to torch's general operators, as everything does that
    is outside `limits`. Nothing is read back from the device.
    """

    name = "flash"

    def __init__(self, limits: FlashLimits | None = None) -> None:
        """Take the operator's limits; None: those of torch's FlashAttention."""
        self._limits = limits or FlashLimits()
        self._portable = SDPAAttention()

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
        if softcap or sinks is not None or not self._takes(q_THD.dtype, q_THD.shape[2], kv):
            return self._portable.forward(
                q_THD, k_TKD, v_TKD, layer, metadata, kv, scale, sliding_window, softcap=softcap, sinks=sinks
            )
        # Imported late: the module makes an operator of its own, which a CPU's process has no use for.
        from torch.nn.attention.varlen import varlen_attn

        kv.write(layer, metadata.slot_mapping, k_TKD, v_TKD)
        tables = metadata.block_tables
        out = varlen_attn(
            q_THD.contiguous(),
            kv.key(layer),
            kv.value(layer),
            metadata.query_start,
            None,
            max(metadata.query_lens),
            tables.shape[1] * kv.block_size,
            scale=scale,
            # Positions before a row that it sees, and after it. The row itself is not counted.
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=q_THD.shape[1] != k_TKD.shape[1],
            seqused_k=metadata.context_lens,
            block_table=tables,
        )
        assert isinstance(out, Tensor)
        return out

    def can_be_captured(self, heads: HeadWeights, dtype: torch.dtype, kv: KVCachePool) -> bool:
        """See Attention."""
        return not heads.softcap and heads.sinks is None and self._takes(dtype, heads.head_dim, kv)

    def _takes(self, dtype: torch.dtype, head_dim: int, kv: KVCachePool) -> bool:
        """True when the operator has such heads, and its offsets reach all of a layer's pool."""
        if kv.dtype is not dtype or not self._limits.fits(dtype, head_dim):
            return False
        return kv.block_size % self._limits.block_multiple == 0 and kv.key(0).numel() <= _INT32
