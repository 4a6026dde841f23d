"""Attention with a gate for each head (Qwen3-Next, Qwen3.5): the sigmoid of the gate multiplies the head's output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.generation.layers.lora import OUTPUT, QKV

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.generation.attention.base import AttentionLayer
    from penstock.generation.layers.decoder_layer import Step
    from penstock.generation.layers.layer_kernels import LayerKernels
    from penstock.generation.layers.linear.base import Linear


class GatedAttention:
    """Fused gates and qkv, head norms, rotary embedding, paged attention, gates, output projection."""

    def __init__(
        self, number: int, layer: AttentionLayer, qkv: Linear, output: Linear, kernels: LayerKernels, turn: int = 0
    ) -> None:
        """Take the layer's parts. `number` is the layer's among all of the model, `layer.index` that in the pool, and
        `turn` the number of its rotary embedding in Step.turns. The rows of `qkv` are gates, queries, keys, values."""
        self.layer = layer
        self.turn = turn
        self.qkv = qkv
        self.output = output
        self._number = number
        self._kernels = kernels
        self._gates = layer.num_heads * layer.head_dim

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Both products."""
        return self.qkv, self.output

    def __call__(self, x_TI: Tensor, step: Step) -> Tensor:
        """Map (T, hidden) to (T, hidden); write this layer's keys and values into the pool."""
        rows_TE = step.linear(self.qkv, x_TI, self._number, QKV)
        cos, sin = step.turns[self.turn]
        qkv = rows_TE[:, self._gates :]
        out_TE = step.attention.forward_qkv(qkv, cos, sin, self.layer, step.metadata, step.kv).flatten(1)
        gated_TE = self._kernels.sigmoid_mul(rows_TE[:, : self._gates], out_TE)
        return step.addend(self.output, gated_TE, self._number, OUTPUT)
