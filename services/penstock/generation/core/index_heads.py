"""Sizes of an indexer: short heads that choose the positions which a row of sparse attention reads. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IndexHeads:
    """Widths of an indexer (DeepSeek Sparse Attention), and the layers that have one.

    A token keeps one *index key* in such a layer, for all heads of the indexer. The score of an earlier position is the
    sum over heads of the product of the row's query with that position's key, where it is above 0, times a weight that
    the row gives the head. The row attends to the positions with the highest scores.
    """

    # Heads of the indexer.
    count: int
    # Dims of a query of each, and of the key.
    dim: int
    # Positions that a row attends to at most.
    most: int
    # One entry a layer: True if it has an indexer; False if it attends as the last layer before it that has.
    layers: tuple[bool, ...]
    # Neighbouring dims turn together, not those half of the turned dims apart.
    is_interleaved: bool = False
    # Of the norm of the key.
    eps: float = 1e-6

    @property
    def num_layers(self) -> int:
        """Number of layers with index keys."""
        return sum(self.layers)

    def place(self, layer: int) -> int:
        """Return the number of a layer among those with index keys, if it is one of them."""
        return sum(self.layers[:layer])
