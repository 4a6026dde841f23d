"""Layers split over the processes of a tensor-parallel group: their results are sums over the processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.generation.layers.decoder_layer import SelfAttention, Step, SwiGLU

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionLayer
    from penstock.generation.layers.linear.base import Linear

# Adds up every process's argument, in place, and returns it.
Sum = Callable[[Tensor], Tensor]


class SummedAttention(SelfAttention):
    """Attention over some of the heads; its output projection has the columns of these."""

    def __init__(self, layer: AttentionLayer, qkv: Linear, output: Linear, turn: int, sum_parts: Sum) -> None:
        """`layer` is of this part."""
        super().__init__(layer, qkv, output, turn)
        self._sum = sum_parts

    def __call__(self, x_TI: Tensor, step: Step) -> Tensor:
        """Map (T, hidden) to (T, hidden), the same in every process."""
        return self._sum(super().__call__(x_TI, step))


class SummedMLP(SwiGLU):
    """An MLP with some of the inner numbers."""

    def __init__(self, layer: int, gated: Linear, down: Linear, sum_parts: Sum) -> None:
        super().__init__(layer, gated, down)
        self._sum = sum_parts

    def __call__(self, x_TI: Tensor, step: Step) -> Tensor:
        """Map (T, hidden) to (T, hidden), the same in every process."""
        return self._sum(super().__call__(x_TI, step))
