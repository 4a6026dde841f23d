"""Sizes of layers that are not all alike, and the vectors that a token has for each layer. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of one layer, in a model with layers of several."""

    num_kv_heads: int
    head_dim: int
    # Width of its MLP.
    inner: int
    # Number of the earlier layer with the keys and values that this one reads; None: its own.
    source: int | None = None
    # There is no product for values: they are the keys before norm and turn.
    values_are_keys: bool = False

    @property
    def kv_width(self) -> int:
        """Numbers of a token's keys."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A vector of `dim` numbers for each token and layer, which the layer adds to the stream after its MLP.

    It is the token's row of a table, joined with a product of the embedding.
    """

    dim: int
    # Rows of the table.
    vocab_size: int
