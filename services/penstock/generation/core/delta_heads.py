"""Sizes of layers with a gated delta rule (Gated DeltaNet), which keep a state of each sequence instead of its keys."""

from __future__ import annotations

from dataclasses import dataclass

# Model types with such layers: those of `models.delta_families`, for readers without torch.
DELTA_TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Widths of a layer's heads, and the layers that there are of the kind. No torch.

    A short convolution over the last `kernel` rows makes queries, keys and values. Each value head keeps a matrix
    (key dims, value dims) in float32, which a row fades, corrects by its key, and reads by its query (Yang et al.,
    2024, Gated Delta Networks). A key head serves `value_heads / key_heads` neighbouring value heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    # Rows that the convolution reads, its own included.
    kernel: int
    # One entry a layer: True for such a layer, False for one that attends.
    layers: tuple[bool, ...]
    # The checkpoint has one tensor for queries, keys, values and gates, by key head, and one for the two numbers of a
    # value head (Qwen3-Next).
    by_key_head: bool = False

    @property
    def keys(self) -> int:
        """Number of outputs that are keys; as many are queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Number of outputs that are values; as many gate the result."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of outputs that the convolution reads."""
        return 2 * self.keys + self.values

    @property
    def num_layers(self) -> int:
        """Number of such layers."""
        return sum(self.layers)

    def place(self, layer: int) -> int:
        """Return the number of a layer among those of its own kind."""
        return sum(one == self.layers[layer] for one in self.layers[:layer])
