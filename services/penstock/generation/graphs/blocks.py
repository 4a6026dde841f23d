"""One decoder layer by itself: over the caller's keys and values, or over blocks of the server's KV pool.

The layer and the attention are the model's own, so that each number has the same bits as in a step of the engine,
except where the residual stream is not of the model's dtype: a step does not round it between two layers. That
attention takes lengths: masks of callers are converted to lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from penstock.common.errors import InvalidArgument
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool

if TYPE_CHECKING:
    from penstock.generation.models.decoder import CausalLM

# Masks hide a column by a number at or below this: minus infinity, or -10000 as in published drivers.
_HIDDEN = -1000.0
_MASK = "inputs[2]"


class LayerPool(KVCachePool):
    """Keys and values of one layer, under any layer number."""

    def __init__(self, num_blocks: int, like: KVCachePool) -> None:
        """Make an empty pool of `num_blocks` blocks, for one layer of the model of `like`."""
        super().__init__(1, num_blocks, like.block_size, like.num_kv_heads, like.head_dim, like.dtype, like.device)

    @override
    def key(self, layer: int) -> Tensor:
        return super().key(0)

    @override
    def value(self, layer: int) -> Tensor:
        return super().value(0)

    @override
    def key_scale(self, layer: int) -> Tensor | None:
        return super().key_scale(0)

    @override
    def value_scale(self, layer: int) -> Tensor | None:
        return super().value_scale(0)

    @override
    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        return super().write(0, slots_T, k_TKD, v_TKD)

    @override
    def read(self, layer: int, slots_C: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return super().read(0, slots_C, dtype)

    @override
    def read_stored(self, layer: int, slots_C: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return super().read_stored(0, slots_C, dtype)


def read_mask(mask_B1RC: Tensor, num_rows: int) -> list[tuple[int, int]]:
    """Return for each sequence the number of tokens in its history, and of its rows; both are at the front.

    The last `num_rows` columns are the rows' own keys, those before them the history. Raises InvalidArgument for a mask
    that is not causal with padding after history and rows.
    """
    is_seen_BRC = mask_B1RC[:, 0] == 0
    if not bool((is_seen_BRC | (mask_B1RC[:, 0] <= _HIDDEN)).all()):
        raise InvalidArgument(_MASK, f"must be 0 where a row sees a token, and at most {_HIDDEN:g} where not")
    return [_lengths(is_seen_RC, num_rows) for is_seen_RC in is_seen_BRC]


def _lengths(is_seen_RC: Tensor, num_rows: int) -> tuple[int, int]:
    columns = is_seen_RC.shape[1] - num_rows
    history, rows = int(is_seen_RC[0, :columns].sum()), int(is_seen_RC.any(-1).sum())
    expected_RC = torch.zeros_like(is_seen_RC)
    expected_RC[:rows, :history] = True
    expected_RC[:rows, columns : columns + rows] = torch.ones(rows, rows, dtype=torch.bool).tril()
    if not rows or not torch.equal(is_seen_RC, expected_RC):
        raise InvalidArgument(
            _MASK,
            "must let row i see the history and rows 0 to i, with padding after each; "
            "a layer's sliding window is its own",
        )
    return history, rows


def run_layer(
    model: CausalLM, layer: int, hidden_TI: Tensor, positions_T: Tensor, metadata: AttentionMetadata, kv: KVCachePool
) -> Tensor:
    """Return the residual stream (T, hidden) after a layer; the stream before it is not changed."""
    stream_TI = hidden_TI.to(model.stream_dtype, copy=True, memory_format=torch.contiguous_format)
    pending_TI = model.layers[layer](stream_TI, None, model.step(positions_T, metadata, kv))
    # Layers with a number that multiplies the stream leave nothing pending: they have no graphs.
    assert pending_TI is not None
    # A layer's result goes to the caller in the model's dtype.
    return stream_TI.add_(pending_TI).to(hidden_TI.dtype)


def run_block(
    model: CausalLM,
    layer: int,
    like: KVCachePool,
    hidden_BRI: Tensor,
    lengths: Sequence[tuple[int, int]],
    positions_BR: Tensor | None,
    history: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (B, R, hidden), keys and values (B, R, kv_heads, head_dim) of a layer's rows.

    `lengths` are (history, rows) of each sequence; further rows are padding, and 0 in the results. `history` are keys
    and values (B, C, kv_heads, head_dim). `positions_BR` None: rows follow their history. Keys and values are stored as
    in the pool `like`.
    """
    size = like.block_size
    blocks = [-(-(before + rows) // size) for before, rows in lengths]
    scratch = LayerPool(sum(blocks), like)
    tables = torch.zeros((len(blocks), max(blocks)), dtype=torch.int32)
    first = 0
    for row, count in enumerate(blocks):
        tables[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    metadata, places_T = AttentionMetadata.build(
        [rows for _, rows in lengths], [before + rows for before, rows in lengths], tables, size, model.device
    )
    if history is not None:
        for row, (before, _) in enumerate(lengths):
            if before:
                begin = int(tables[row, 0]) * size
                slots = torch.arange(begin, begin + before, device=model.device)
                scratch.write(
                    layer, slots, history[0][row, :before].contiguous(), history[1][row, :before].contiguous()
                )
    is_row_BR = torch.arange(hidden_BRI.shape[1]) < torch.tensor([rows for _, rows in lengths])[:, None]
    is_row_BR = is_row_BR.to(model.device)
    positions_T = places_T if positions_BR is None else positions_BR[is_row_BR].long()
    hidden_TI = run_layer(model, layer, hidden_BRI[is_row_BR], positions_T, metadata, scratch)
    keys_TKD, values_TKD = scratch.read(layer, metadata.slot_mapping, model.dtype)
    return _spread(hidden_TI, is_row_BR), _spread(keys_TKD, is_row_BR), _spread(values_TKD, is_row_BR)


def run_block_in_pool(
    model: CausalLM,
    layer: int,
    kv: KVCachePool,
    hidden_RI: Tensor,
    start: int,
    blocks: Sequence[int],
    positions_R: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same for rows of one sequence, (R, ...), with its keys and values in `blocks` of the pool.

    The sequence has `start` tokens in this layer; the rows' keys and values are written after them.
    """
    rows = hidden_RI.shape[0]
    tables = torch.tensor([list(blocks)], dtype=torch.int32)
    metadata, places_R = AttentionMetadata.build([rows], [start + rows], tables, kv.block_size, model.device)
    positions_R = places_R if positions_R is None else positions_R.long()
    hidden_RI = run_layer(model, layer, hidden_RI, positions_R, metadata, kv)
    keys_RKD, values_RKD = kv.read(layer, metadata.slot_mapping, model.dtype)
    return hidden_RI, keys_RKD, values_RKD


def _spread(found_T: Tensor, is_row_BR: Tensor) -> Tensor:
    """Return rows at their places in a batch (B, R, ...), and 0 elsewhere."""
    if bool(is_row_BR.all()):
        return found_T.view(*is_row_BR.shape, *found_T.shape[1:])
    spread = found_T.new_zeros((*is_row_BR.shape, *found_T.shape[1:]))
    spread[is_row_BR] = found_T
    return spread
