"""The tensors behind the block ids: one paged pool of keys and values for every layer. Accounting is BlockPool's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.common.errors import StartupError


def kv_bytes_per_block(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values together."""
    return num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize


class KVCachePool:
    """(layers, 2, blocks, block_size, kv_heads, head_dim), zeroed.

    Zeroed rather than empty for two reasons: the operating system commits the pages only as blocks are first written,
    and a masked position never holds a NaN.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises StartupError naming --kv-memory when the memory cannot be had."""
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.bytes_per_block = kv_bytes_per_block(num_layers, block_size, num_kv_heads, head_dim, dtype)
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        try:
            self._data = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise StartupError(
                f"cannot allocate a KV pool of {num_blocks * self.bytes_per_block} bytes ({num_blocks} blocks): "
                "lower --kv-memory",
                flag="--kv-memory",
            ) from error
        self._keys: list[Tensor] = [layer[0] for layer in self._data]
        self._values: list[Tensor] = [layer[1] for layer in self._data]

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Size of the whole pool."""
        return self.num_blocks * self.bytes_per_block

    def key(self, layer: int) -> Tensor:
        """View (blocks, block_size, kv_heads, head_dim), contiguous."""
        return self._keys[layer]

    def value(self, layer: int) -> Tensor:
        """View (blocks, block_size, kv_heads, head_dim), contiguous."""
        return self._values[layer]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in every layer. All sources are read before any destination is written."""
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        for layer in self._data:
            layer.index_copy_(1, destinations, layer.index_select(1, sources))

    def clear(self) -> None:
        """Zero every block."""
        self._data.zero_()
