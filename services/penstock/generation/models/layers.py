"""The decoder's building blocks, as transformers 5.x computes them. Plain callables: nothing here is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention, AttentionMetadata, HeadWeights
    from penstock.generation.models.config import ModelConfig
    from penstock.generation.models.kernels import LayerKernels
    from penstock.generation.quantization.base import Linear
    from penstock.generation.runner.kv_cache import KVCachePool


class RMSNorm:
    """Over the last dimension: float32 inside, cast back, then times the weight."""

    def __init__(self, weight: Tensor, eps: float, kernels: LayerKernels) -> None:
        self._kernels = kernels
        self._weight = weight
        self._shape = weight.shape
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape and dtype."""
        # torch's kernel works in float32 and rounds before the weight: bit-equal to transformers', and faster.
        return F.rms_norm(x, self._shape, self._weight, self._eps)

    def add(self, hidden_TI: Tensor, pending_TI: Tensor | None) -> Tensor:
        """The norm of `hidden` + `pending`; the sum is left in `hidden`."""
        if pending_TI is None:
            return self(hidden_TI)
        return self._kernels.add_rms_norm(hidden_TI, pending_TI, self._weight, self._eps)


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward pass shares. cos and sin: (T, 1, head_dim / 2)."""

    cos: Tensor
    sin: Tensor
    metadata: AttentionMetadata
    kv: KVCachePool
    attention: Attention


class SelfAttention:
    """Fused qkv, optional head norm, rotary embedding, paged attention, output projection."""

    def __init__(self, config: ModelConfig, layer: int, qkv: Linear, output: Linear, heads: HeadWeights) -> None:
        self._layer = layer
        self._heads = heads
        self._scale = config.head_dim**-0.5
        self._window = config.sliding_windows[layer]
        self._qkv = qkv
        self._output = output

    def __call__(self, x_TI: Tensor, step: Step) -> Tensor:
        """(T, hidden) -> (T, hidden); writes this layer's keys and values into the pool."""
        qkv = self._qkv(x_TI)
        out = step.attention.forward_qkv(
            qkv, step.cos, step.sin, self._heads, self._layer, step.metadata, step.kv, self._scale, self._window
        )
        return self._output(out.flatten(1))


class SwiGLU:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, gated: Linear, down: Linear) -> None:
        self._gated = gated
        self._down = down

    def __call__(self, x_TI: Tensor) -> Tensor:
        """(T, hidden) -> (T, hidden)."""
        return self._down(self._gated(x_TI))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm attention and MLP. What each adds to the residual stream is added by the next norm, in one pass."""

    input_norm: RMSNorm
    attention: SelfAttention
    post_attention_norm: RMSNorm
    mlp: SwiGLU

    def __call__(self, hidden_TI: Tensor, pending_TI: Tensor | None, step: Step) -> Tensor:
        """The residual stream is `hidden` + `pending` (None: nothing); both (T, hidden). Changes `hidden` in place and
        returns what is pending after this layer."""
        normed = self.input_norm.add(hidden_TI, pending_TI)
        return self.mlp(self.post_attention_norm.add(hidden_TI, self.attention(normed, step)))
