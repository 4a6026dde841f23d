"""Building blocks of the decoder, computed as in transformers 5.x. They are plain callables: nothing here is
trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.generation.layers.lora import DOWN, GATED, OUTPUT, QKV, SITES_A_LAYER, AdapterBatch, SiteAdapters

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention, AttentionMetadata, HeadWeights
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.layers.kernels import LayerKernels
    from penstock.generation.layers.linear.base import Linear


class RMSNorm:
    """RMSNorm over the last dimension: float32 inside, cast back, then times the weight."""

    def __init__(self, weight: Tensor, eps: float, kernels: LayerKernels) -> None:
        self.weight = weight
        self.eps = eps
        self.kernels = kernels

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return the norm of `x_TI`, in its shape and dtype."""
        return self.kernels.rms_norm(x_TI, self.weight, self.eps)

    def add(self, hidden_TI: Tensor, pending_TI: Tensor | None) -> Tensor:
        """Return the norm of `hidden` + `pending`; leave the sum in `hidden`."""
        if pending_TI is None:
            return self(hidden_TI)
        return self.kernels.add_rms_norm(hidden_TI, pending_TI, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Step:
    """Arguments that all layers of one forward pass share. cos and sin: (T, 1, head_dim / 2)."""

    cos: Tensor
    sin: Tensor
    metadata: AttentionMetadata
    kv: KVCachePool
    attention: Attention
    # None: no row has an adapter.
    adapters: AdapterBatch | None = None

    def linear(self, linear: Linear, x_TI: Tensor, layer: int, site: int) -> Tensor:
        """Return the product of a linear layer, with the adapters' parts where there are some."""
        if self.adapters is None:
            return linear(x_TI)
        number = layer * SITES_A_LAYER + site
        if not self.adapters.changes_site(number):
            return linear(x_TI)
        return linear.adapted(x_TI, SiteAdapters(self.adapters, number))


class SelfAttention:
    """Fused qkv, optional head norm, rotary embedding, paged attention, output projection."""

    def __init__(self, config: ModelConfig, layer: int, qkv: Linear, output: Linear, heads: HeadWeights) -> None:
        self.heads = heads
        self.window = config.sliding_windows[layer]
        self.qkv = qkv
        self.output = output
        self._layer = layer
        self._scale = config.head_dim**-0.5

    def __call__(self, x_TI: Tensor, step: Step) -> Tensor:
        """Map (T, hidden) to (T, hidden); write this layer's keys and values into the pool."""
        qkv = step.linear(self.qkv, x_TI, self._layer, QKV)
        out = step.attention.forward_qkv(
            qkv, step.cos, step.sin, self.heads, self._layer, step.metadata, step.kv, self._scale, self.window
        )
        return step.linear(self.output, out.flatten(1), self._layer, OUTPUT)


class SwiGLU:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, layer: int, gated: Linear, down: Linear) -> None:
        self.gated = gated
        self.down = down
        self._layer = layer

    def __call__(self, x_TI: Tensor, step: Step) -> Tensor:
        """Map (T, hidden) to (T, hidden)."""
        inner = step.linear(self.gated, x_TI, self._layer, GATED)
        return step.linear(self.down, inner, self._layer, DOWN)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm attention and MLP. The next norm adds the output of each to the residual stream, in one pass."""

    input_norm: RMSNorm
    attention: SelfAttention
    post_attention_norm: RMSNorm
    mlp: SwiGLU

    def __call__(self, hidden_TI: Tensor, pending_TI: Tensor | None, step: Step) -> Tensor:
        """Run the layer on the residual stream `hidden` + `pending` (None: nothing), both (T, hidden). Changes `hidden`
        in place and returns the tensor that is pending after this layer."""
        normed = self.input_norm.add(hidden_TI, pending_TI)
        return self.mlp(self.post_attention_norm.add(hidden_TI, self.attention(normed, step)), step)
