"""Shape of the blocks of a pool of keys and values: what a block costs, and pools of such blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.generation.attention.index_keys import IndexRows, index_rows
from penstock.generation.attention.kv_cache import KVCachePool, kv_bytes_per_block, kv_cache_dtype

if TYPE_CHECKING:
    from penstock.generation.attention.cache_layout import CacheLayout
    from penstock.generation.core.layer_shapes import LayerShape
    from penstock.generation.core.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVShape:
    """Blocks of `block_size` tokens in `num_layers` layers; of the other fields see KVCachePool."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    has_values: bool
    index: IndexRows | None
    shapes: tuple[LayerShape, ...] = ()

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        block_size: int,
        *,
        requested: str = "auto",
        num_layers: int | None = None,
        num_kv_heads: int | None = None,
    ) -> KVShape:
        """Return the shape for a model, or a draft head, that computes in `dtype`. `requested`: as of
        `kv_cache_dtype`. `num_layers`: layers of a block; None: all that have keys. `num_kv_heads`: heads of this
        process; None: all of the model's."""
        return cls(
            config.num_kv_layers if num_layers is None else num_layers,
            block_size,
            config.num_kv_heads if num_kv_heads is None else num_kv_heads,
            config.head_dim,
            kv_cache_dtype(requested, dtype),
            config.has_values,
            index_rows(config, dtype),
            config.kv_shapes,
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, with scales and index keys."""
        return kv_bytes_per_block(
            self.num_layers,
            self.block_size,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            has_values=self.has_values,
            index=self.index,
            shapes=self.shapes,
        )

    def pool(
        self,
        num_blocks: int,
        device: torch.device,
        *,
        num_further_blocks: int = 0,
        has_scrap: bool = False,
        layout: CacheLayout | None = None,
        begins_small: bool = False,
    ) -> KVCachePool:
        """Allocate a pool; arguments as KVCachePool's. Raises StartupError naming --kv-memory."""
        return KVCachePool(
            self.num_layers,
            num_blocks,
            self.block_size,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            device,
            num_further_blocks=num_further_blocks,
            has_scrap=has_scrap,
            layout=layout,
            has_values=self.has_values,
            index=self.index,
            begins_small=begins_small,
            shapes=self.shapes,
        )
