"""Heads of keys and values that are turned by a Hadamard matrix before they are rounded to int8 (rounding/rotation.py).

An outlier of a head is spread over its block, so that the head's scale is finer. Scores and outputs stay the same: the
query is turned like the keys, and the output is turned back like the values (QuaRot, arXiv:2404.00456).
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.generation.rounding.rotation import (
    MOST_OF_A_HEAD,
    halved,
    rotated,
    rotated_by_product,
    rotation_block,
    rotation_matrix,
)


class TurnedHeads:
    """Turns heads for one pool, and back. csrc/attention has the same block and the same factors."""

    def __init__(self, head_dim: int, device: torch.device) -> None:
        self._block = rotation_block(head_dim, MOST_OF_A_HEAD)
        # Makes up for the block, since the matrix is its own inverse, times the block. A power of two.
        self._back = halved(self._block) ** 2 / self._block
        # On the CPU heads are turned stage by stage, with the kernels' bits: a product there sums in an order that
        # depends on the number of rows. On an accelerator each stage would be several launches.
        self._by_product = device.type != "cpu"
        self._matrix = rotation_matrix(self._block, torch.float32, device) if self._by_product else None

    def stored(self, x_TKD: Tensor) -> Tensor:
        """Return keys or values in float32 as they are rounded: turned."""
        if self._by_product:
            return rotated_by_product(x_TKD.float(), self._matrix)
        return rotated(x_TKD, self._block) / halved(self._block)

    def back(self, x_THD: Tensor) -> Tensor:
        """Return what was turned as it was, in its dtype. A query goes this way, too: its products with turned keys are
        then those with the keys."""
        return x_THD if self._block == 1 else (self.stored(x_THD) * self._back).to(x_THD.dtype)
