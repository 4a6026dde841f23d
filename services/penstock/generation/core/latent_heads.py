"""Sizes of multi-head latent attention (MLA), in which a token keeps one short row for all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass

# Model types that keep such rows: those of `models.latent_families`, for readers without torch.
LATENT_TYPES = (
    "deepseek_v2", "deepseek_v3", "kimi_k2", "sarvam_mla", "glm4_moe_lite", "youtu", "minicpm3", "deepseek_v32",
    "glm_moe_dsa",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Widths of the parts of a row and of a head. No torch.

    A token's row is a normed *latent*, and a turned part of the key that all heads share. Each head makes the rest of
    its key and its value from the latent, by products of its own.
    """

    # Numbers of the latent.
    rank: int
    # Dims of a query, and of its key, that do not turn and that do.
    plain_dim: int
    turned_dim: int
    # Dims of a head's value.
    value_dim: int
    # Numbers between the two products that make the queries; 0: one product makes them.
    query_rank: int = 0
    # Of the norms of the latent and of these numbers.
    eps: float = 1e-6

    @property
    def row_dim(self) -> int:
        """Numbers that a token keeps in a layer."""
        return self.rank + self.turned_dim

    @property
    def query_dim(self) -> int:
        """Dims of a query."""
        return self.plain_dim + self.turned_dim
