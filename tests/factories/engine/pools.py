"""KV pools that show reads of unwritten places."""

from __future__ import annotations

import torch
from penstock.generation.attention.kv_cache import KVCachePool


def unwritten_pool(
    layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KVCachePool:
    """Make a pool on the CPU that gives NaN where nothing was written."""
    kv = KVCachePool(layers, blocks, block_size, kv_heads, head_dim, dtype, torch.device("cpu"))
    spoil(kv)
    return kv


def spoil(kv: KVCachePool) -> None:
    """Make every place of the pool NaN."""
    for layer in range(kv.num_layers):
        for part, scale in ((kv.key(layer), kv.key_scale(layer)), (kv.value(layer), kv.value_scale(layer))):
            (part if scale is None else scale).fill_(torch.nan)
