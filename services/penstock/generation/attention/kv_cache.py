"""The tensors behind the block ids: one paged pool of keys and values for every layer. Accounting is BlockPool's."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.common.errors import StartupError
from penstock.generation.attention.cache_layout import CacheLayout
from penstock.generation.attention.fresh_memory import fresh_zeros, small_zeros
from penstock.generation.attention.slot_rows import SlotRows, heads_of_slot, rows_of
from penstock.generation.attention.turned_heads import TurnedHeads
from penstock.generation.core.cache_group import FIRST_BUNDLES
from penstock.generation.host.small_pages import SmallPages, has_small_pages

if TYPE_CHECKING:
    from penstock.generation.attention.index_keys import IndexRows
    from penstock.generation.attention.state_pool import StatePool
    from penstock.generation.core.layer_shapes import LayerShape

# Scales of an int8 pool: one for each token and key/value head, for keys and for values.
SCALE_DTYPE = torch.float32
_LARGEST = 127.0
# Below this a head is all zeros: its inverse scale would overflow.
_NEGLIGIBLE = 1e-30


def kv_cache_dtype(requested: str, model: torch.dtype) -> torch.dtype:
    """Dtype of the pool for `--kv-cache-dtype requested` ("auto" or "int8") and a model of dtype `model`."""
    return torch.int8 if requested == "int8" else model


def kv_bytes_per_block(
    num_layers: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    has_values: bool = True,
    index: IndexRows | None = None,
    shapes: Sequence[LayerShape] = (),
) -> int:
    """Bytes of one block over all layers, keys and values together, with the scales of int8 and the index keys.
    `has_values`, `index` and `shapes`: see KVCachePool."""
    scales = heads_of_slot(shapes, num_kv_heads, head_dim) * SCALE_DTYPE.itemsize if dtype is torch.int8 else 0
    rows = num_layers * (1 + has_values) * block_size * (num_kv_heads * head_dim * dtype.itemsize + scales)
    return rows + (0 if index is None else block_size * index.token_bytes)


def quantise(x_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise symmetrically by the largest magnitude of each token and head: (T, K, D) int8 and its scales (T, K).

    The product of the two is `x` to half a scale. A head that is not finite has the scale NaN, so that rows that attend
    to it get NaN, too.
    """
    x_TKD = x_TKD.float()
    most_TK = x_TKD.abs().amax(-1)
    # A quotient, as in csrc/attention/rope.cpp: torch divides a number by a tensor as a product with its reciprocal.
    inverse_TK = torch.where(most_TK > _NEGLIGIBLE, torch.full_like(most_TK, _LARGEST) / most_TK, 0.0)
    whole = (x_TKD * inverse_TK.unsqueeze(-1)).round().nan_to_num(0.0).to(torch.int8)
    return whole, torch.where(most_TK.isfinite(), most_TK / _LARGEST, torch.nan)


class KVCachePool:
    """Keys and values (layers, 2, blocks, block_size, kv_heads, head_dim) of `dtype`, which is the model's, or int8
    with scales (layers, 2, blocks, block_size, kv_heads); zeroed. Heads of int8 are turned (turned_heads.py).

    Without values (latent attention) the second dimension is 1: what reads values gets the keys.

    Index keys, if there are some, are (layers with an indexer, 1, blocks, block_size, dim).

    With a layout of several groups the first dimension is the layers of one block, and a layer's blocks are those of
    its view (AttentionMetadata.view).

    Layers may have heads of several sizes: those of the shape are then the widest's, a layer's rows are a part of a
    slot (slot_rows.py), and scales are (layers, 2, blocks, block_size, heads of a slot).

    Zeroed instead of empty for two reasons: the operating system commits the pages only when blocks are first written,
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
        *,
        num_further_blocks: int = 0,
        has_scrap: bool = False,
        layout: CacheLayout | None = None,
        has_values: bool = True,
        index: IndexRows | None = None,
        begins_small: bool = False,
        shapes: Sequence[LayerShape] = (),
    ) -> None:
        """Allocate the pool: `num_blocks` for requests, and after them further ones, which no request gets.
        `has_scrap`: there is one more, for rows of no sequence. `layout`: places of the model's layers in blocks of
        `num_layers`; None: a block holds all layers. `has_values`: a token keeps values beside its keys. `index`: index
        keys beside both; None: there are none. `begins_small`: the pages are small until `leave_small_pages`, in the
        host's memory and where the system can do so. `shapes`: those of the layers with keys, if they differ.

        Raises StartupError naming --kv-memory when the memory cannot be had.
        """
        self.num_layers = num_layers
        # None: a block holds all layers.
        self.layout = layout
        # Of each layer, where they differ.
        columns = () if layout is None else layout.columns
        self._slot_rows: list[SlotRows] = rows_of(shapes, columns)
        # Of each layer in turn, its view, its place and its column, for the kernels that run all layers; empty: layers
        # are in order, in one view.
        self.places: list[int] = []
        if layout is not None:
            for place, column in zip(layout.places, columns or (0,) * len(layout.places), strict=True):
                self.places += *place, column
        self.num_blocks = num_blocks
        self.num_further_blocks = num_further_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.has_values = has_values
        self.index = index
        self.dtype = dtype
        self.device = device
        # States of recurrent layers; None: the model has none.
        self.states: StatePool | None = None
        self.bytes_per_block = kv_bytes_per_block(
            num_layers, block_size, num_kv_heads, head_dim, dtype, has_values=has_values, index=index, shapes=shapes
        )
        all_blocks = num_blocks + num_further_blocks + has_scrap
        # Block that is written and never read; None: there is none.
        self.scrap_block = all_blocks - 1 if has_scrap else None
        shape = (num_layers, 1 + has_values, all_blocks, block_size, num_kv_heads)
        # Of each of `parts`; empty: the pages are large.
        self._small: list[SmallPages] = []

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            if not begins_small or device.type != "cpu" or not has_small_pages():
                return fresh_zeros(shape, dtype, device)
            tensor, pages = small_zeros(shape, dtype)
            self._small.append(pages)
            return tensor

        try:
            self._data = zeros((*shape, head_dim), dtype)
            heads = heads_of_slot(shapes, num_kv_heads, head_dim)
            self._scales = zeros((*shape[:-1], heads), SCALE_DTYPE) if dtype is torch.int8 else None
            self._index = None
            if index is not None:
                self._index = zeros((index.num_layers, 1, all_blocks, block_size, index.dim), index.dtype)
        except (RuntimeError, MemoryError, ValueError) as error:  # ValueError: more than numpy can count
            raise StartupError(
                f"cannot allocate a KV pool of {all_blocks * self.bytes_per_block} bytes ({all_blocks} blocks): "
                "lower --kv-memory",
                flag="--kv-memory",
            ) from error
        # Place of each layer.
        places = range(num_layers) if layout is None else [place for _, place in layout.places]
        # By dims of a head.
        self._turned: dict[int, TurnedHeads] | None = None
        if dtype is torch.int8:
            self._turned = {dim: TurnedHeads(dim, device) for dim in {head_dim, *(one.head_dim for one in shapes)}}
        self._places = tuple(places)
        self._keys: list[Tensor] = [self._part(layer, 0) for layer in range(len(self._places))]
        self._values: list[Tensor] = self._keys
        if has_values:
            self._values = [self._part(layer, 1) for layer in range(len(self._places))]
        self._by_slot: KVCachePool | None = None

    def _part(self, layer: int, part: int) -> Tensor:
        """Return a layer's keys (0) or values (1)."""
        place = self._data[self._places[layer], part]
        return self._slot_rows[layer].of(place) if self._slot_rows else place

    def _scale_part(self, layer: int, part: int) -> Tensor | None:
        """Return the scales of the same."""
        if self._scales is None:
            return None
        place = self._scales[self._places[layer], part]
        return self._slot_rows[layer].scales_of(place) if self._slot_rows else place

    def shallow(self, num_layers: int) -> KVCachePool:
        """Return this pool's first layers, in the same memory, for a model with only these."""
        if self.layout is not None:
            return self
        twin = copy.copy(self)
        twin.num_layers = num_layers
        twin.bytes_per_block = self.bytes_per_block // self.num_layers * num_layers
        twin._data = self._data[:num_layers]
        twin._scales = None if self._scales is None else self._scales[:num_layers]
        twin._places, twin._slot_rows = self._places[:num_layers], self._slot_rows[:num_layers]
        twin._by_slot = None
        twin._keys, twin._values = self._keys[:num_layers], self._values[:num_layers]
        return twin

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """The whole pool and its scales, in the shapes of the class; None for unquantised keys and values."""
        return self._data, self._scales

    @property
    def parts(self) -> list[Tensor]:
        """All memory of the blocks: tensors (layers, parts, blocks, ...)."""
        return [part for part in (self._data, self._scales, self._index) if part is not None]

    @property
    def is_plain(self) -> bool:
        """True when a token keeps numbers of the model's dtype, without scales and index keys."""
        return self._scales is None and self._index is None

    @property
    def geometry(self) -> Hashable:
        """Facts that operators over `layer_tensors` depend on, beside the number of blocks."""
        return self.block_size, self.num_kv_heads, self.head_dim, self.dtype, self.has_values, self.layout

    @property
    def layer_tensors(self) -> tuple[Tensor, ...]:
        """Keys of all layers, then their values, where a token has some."""
        return (*self._keys, *self._values) if self.has_values else tuple(self._keys)

    def over(self, tensors: Sequence[Tensor]) -> KVCachePool:
        """Return this pool with others for its `layer_tensors`; nothing else of it may be read. It is plain."""
        twin, layers = copy.copy(self), len(self._keys)
        twin._keys = list(tensors[:layers])
        twin._values = list(tensors[layers:]) or twin._keys
        return twin

    @property
    def by_slot(self) -> KVCachePool:
        """The rows of this pool, in the same memory, as blocks of one token: for attention to chosen positions, with
        a table of slots. It has no index keys."""
        if self._by_slot is None:
            twin = copy.copy(self)
            twin.block_size, twin._index, twin.index = 1, None, None
            twin._data = self._data.flatten(2, 3).unsqueeze(3)
            twin._scales = None if self._scales is None else self._scales.flatten(2, 3).unsqueeze(3)
            twin._keys = [twin._data[place, 0] for place in self._places]
            twin._values = [twin._data[place, -1] for place in self._places]
            self._by_slot = twin
        return self._by_slot

    @property
    def num_slots(self) -> int:
        """Number of tokens of whole contexts, in every layer, that the pool has room for, for requests."""
        return self.num_blocks // self.bundle_blocks * self.block_size

    @property
    def bundle_blocks(self) -> int:
        """Blocks in which all layers keep a block of tokens."""
        return 1 if self.layout is None else self.layout.bundle_blocks

    def view_of(self, layer: int) -> int:
        """Number of the view of the step's metadata that a layer has its blocks from."""
        return 0 if self.layout is None else self.layout.places[layer][0]

    @property
    def num_bytes(self) -> int:
        """Size of the requests' blocks in bytes."""
        return self.num_blocks * self.bytes_per_block

    def key(self, layer: int) -> Tensor:
        """View (blocks, block_size, kv_heads, head_dim), contiguous but for slots that layers share."""
        return self._keys[layer]

    def value(self, layer: int) -> Tensor:
        """View of the values: see `key`."""
        return self._values[layer]

    def key_scale(self, layer: int) -> Tensor | None:
        """View (blocks, block_size, kv_heads) of the keys' scales, as `key`; None for unquantised keys."""
        return self._scale_part(layer, 0)

    def value_scale(self, layer: int) -> Tensor | None:
        """View of the values' scales: see `key_scale`."""
        return self._scale_part(layer, -1)

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Store one row of keys and values per slot; return them as `read_stored` will, in their own dtype. A pool
        without values stores the keys alone."""
        if self._scales is None or self._turned is None:
            self._rows(self._keys[layer]).index_copy_(0, slots_T, k_TKD.flatten(1))
            if self.has_values:
                self._rows(self._values[layer]).index_copy_(0, slots_T, v_TKD.flatten(1))
            return k_TKD, v_TKD
        kept = (k_TKD, v_TKD) if self.has_values else (k_TKD,)
        parts = [quantise(self._turned[x.shape[-1]].stored(x)) for x in kept]
        # The kernels look for NaN in scores only, so a NaN among the values goes into the scale of the keys.
        parts[0] = parts[0][0], torch.where(parts[-1][1].isnan(), torch.nan, parts[0][1])
        for number, (rows, scales) in enumerate(parts):
            places = self._scale_part(layer, number)
            assert places is not None
            self._rows(self._part(layer, number)).index_copy_(0, slots_T, rows.flatten(1))
            self._rows(places).index_copy_(0, slots_T, scales)
        return _dequantised(*parts[0], k_TKD.dtype), _dequantised(*parts[-1], v_TKD.dtype)

    def read(self, layer: int, slots_C: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values (C, kv_heads, head_dim) of the slots: int8 as `dtype`, others unchanged."""
        if self._turned is None:
            return self.read_stored(layer, slots_C, dtype)
        # Rounded once.
        keys, values = (self._turned[x.shape[-1]].back(x) for x in self.read_stored(layer, slots_C, torch.float32))
        return keys.to(dtype), values.to(dtype)

    def turned(self, x_THD: Tensor) -> Tensor:
        """Return queries for the keys of `read_stored`, or turn outputs of its values back: unchanged unless the pool
        is int8."""
        return x_THD if self._turned is None else self._turned[x_THD.shape[-1]].back(x_THD)

    def read_stored(self, layer: int, slots_C: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the same as it is stored: heads of int8 are turned."""
        # F.embedding gathers rows several times faster than index_select or advanced indexing on CPU.
        parts = (self._keys[layer], self._values[layer]) if self.has_values else (self._keys[layer],)
        shape = (-1, *parts[0].shape[2:])
        rows = [F.embedding(slots_C, self._rows(x)).view(shape) for x in parts]
        if self._scales is not None:
            found = [self._scale_part(layer, part) for part in range(len(parts))]
            scales = [F.embedding(slots_C, self._rows(x)) for x in found if x is not None]
            rows = [_dequantised(row, scale, dtype) for row, scale in zip(rows, scales, strict=True)]
        return rows[0], rows[-1]

    def index_key(self, place: int) -> Tensor:
        """View (blocks, block_size, dim) of the index keys of a layer, the `place`th one that has some."""
        assert self._index is not None
        return self._index[place, 0]

    def write_index(self, place: int, slots_T: Tensor, key_TD: Tensor) -> None:
        """Store one index key per slot."""
        self.index_key(place).flatten(0, 1).index_copy_(0, slots_T, key_TD)

    def read_index(self, place: int, slots_C: Tensor) -> Tensor:
        """Return index keys (C, dim) of the slots."""
        return F.embedding(slots_C, self.index_key(place).flatten(0, 1))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in every layer. All sources are read before any destination is written."""
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        for pool in self.parts:
            for layer in pool:
                layer.index_copy_(1, destinations, layer.index_select(1, sources))

    def leave_small_pages(self) -> None:
        """Get large pages from now on: call it before blocks beyond FIRST_BUNDLES are written. Only the first call does
        anything. Thread-safe."""
        small, self._small = self._small, []
        # Its parts are in this order.
        for part, pages in zip(self.parts, small, strict=False):
            # Each layer's keys, and its values, begin with the first block.
            places, size = part.shape[0] * part.shape[1], part[0, 0].nbytes
            written = part[0, 0, : FIRST_BUNDLES * self.bundle_blocks].nbytes
            pages.leave((place * size, place * size + written) for place in range(places))

    def clear(self) -> None:
        """Zero every block."""
        for pool in self.parts:
            pool.zero_()

    def _rows(self, blocks: Tensor) -> Tensor:
        """Return a view (slots, all numbers of a slot)."""
        return blocks.view(blocks.shape[0] * self.block_size, -1)


def _dequantised(whole_TKD: Tensor, scale_TK: Tensor, dtype: torch.dtype) -> Tensor:
    return (whole_TKD.float() * scale_TK.unsqueeze(-1)).to(dtype)
