"""Rows of a token in a pool of layers with heads of several sizes.

A place of a block has room for the widest layer's keys, and for its values. A narrower layer's keys begin at a *column*
of the place: as many layers share a place as fit side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.generation.core.layer_shapes import LayerShape


@dataclass(frozen=True, slots=True)
class SlotRows:
    """One layer's keys, or values, in a slot."""

    num_kv_heads: int
    head_dim: int
    # First number of them in the slot.
    column: int = 0

    def of(self, place: Tensor) -> Tensor:
        """Return the view (blocks, block_size, kv_heads, head_dim) of the keys, or values, of a place."""
        width = self.num_kv_heads * self.head_dim
        rows = place.flatten(2)[:, :, self.column : self.column + width]
        return rows.view(*rows.shape[:2], self.num_kv_heads, self.head_dim)

    def scales_of(self, place: Tensor) -> Tensor:
        """Return the view (blocks, block_size, kv_heads) of the scales of a place."""
        first = self.column // self.head_dim
        return place[:, :, first : first + self.num_kv_heads]


def rows_of(shapes: Sequence[LayerShape], columns: Sequence[int]) -> list[SlotRows]:
    """Return the rows of each layer with keys. `columns`: where they begin; empty: at the beginning of a place."""
    places = columns or (0,) * len(shapes)
    return [SlotRows(shape.num_kv_heads, shape.head_dim, column) for shape, column in zip(shapes, places, strict=True)]


def heads_of_slot(shapes: Sequence[LayerShape], num_kv_heads: int, head_dim: int) -> int:
    """Return the most heads that layers have side by side in a slot of `num_kv_heads * head_dim` numbers."""
    width = num_kv_heads * head_dim
    return max((width // shape.kv_width * shape.num_kv_heads for shape in shapes), default=num_kv_heads)
