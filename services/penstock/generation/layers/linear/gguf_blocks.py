"""Weights in the blocks of GGUF's types: the C++ kernels multiply them at the size of the file.

csrc/linear/gguf_blocks.h has the layout. A weight may join matrices of several types: a panel of outputs has one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.generation.layers.linear.base import BlockWeight, NotFinite

# ggml's numbers of the types with a product, by their names.
BLOCK_TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "MXFP4": 39,
}
PANEL = 32
_LINE = 64


def panel_types(parts: Sequence[tuple[str, int]], *, gated: bool) -> Tensor | None:
    """Return the number of each panel's type; None if outputs of two types would share a panel. `parts`: as
    BlockWeight.block_parts. Gated: a panel has outputs of both halves."""
    numbers = torch.tensor([BLOCK_TYPES[name] for name, _ in parts])
    rows = numbers.repeat_interleave(torch.tensor([count for _, count in parts]))
    if gated:
        halves = rows.chunk(2)
        found = [_in_panels(half, PANEL // 2) for half in halves]
        panels = torch.cat(found, dim=1)
    else:
        panels = _in_panels(rows, PANEL)
    types = panels[:, 0]
    return types if torch.equal(panels, types[:, None].expand_as(panels)) else None


def _in_panels(rows: Tensor, width: int) -> Tensor:
    """Return (panels, width); the last row fills up the last panel."""
    return torch.cat([rows, rows[-1:].expand(-len(rows) % width)]).view(-1, width)


def panel_table(types: Tensor, inputs: int) -> Tensor:
    """Return the table at the beginning of a packed weight, in int64: of each panel its first byte and its type."""
    sizes = torch.zeros(256, dtype=torch.int64)
    for number in set(types.tolist()):
        sizes[number] = torch.ops.penstock.block_panel_bytes(number, inputs)
    first = -(-(len(types) + 1) * 8 // _LINE) * _LINE
    ends = first + sizes[types].cumsum(0)
    begins = torch.cat([ends.new_tensor([first]), ends])
    return begins << 8 | torch.cat([types, types.new_zeros(1)])


def block_table(parts: Sequence[tuple[str, int]], inputs: int, *, gated: bool) -> Tensor | None:
    """Return `panel_table` of a weight of these parts; None: two types would share a panel."""
    types = panel_types(parts, gated=gated)
    return None if types is None else panel_table(types, inputs)


def table_bytes(table: Tensor | None) -> int:
    """Return the bytes of the weight of a table."""
    assert table is not None, "a weight without a table is not in blocks"
    return int(table[-1]) >> 8


def fill_blocks(memory: Tensor, table: Tensor, weight: BlockWeight, *, gated: bool) -> None:
    """Write a weight into `memory`, which has as many bytes as `table` ends with. Raises NotFinite."""
    memory.view(torch.int64)[: len(table)] = table
    outputs, inputs = weight.shape
    first = 0
    for piece in weight.block_pieces():
        bad = torch.ops.penstock.pack_blocks(piece.contiguous(), first, outputs, inputs, memory, gated)
        if bad >= 0:
            raise NotFinite(first + bad)
        first += len(piece)
