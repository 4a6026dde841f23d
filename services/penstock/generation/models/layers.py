"""The decoder's building blocks, as transformers 5.x computes them. Plain callables: nothing here is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.generation.models.rope import rotate

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention, AttentionMetadata
    from penstock.generation.models.config import ModelConfig
    from penstock.generation.quantization.base import Linear
    from penstock.generation.runner.kv_cache import KVCachePool


class RMSNorm:
    """Over the last dimension: float32 inside, cast back, then times the weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._shape = weight.shape
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape and dtype."""
        # torch's kernel works in float32 and rounds before the weight: bit-equal to transformers', and faster.
        return F.rms_norm(x, self._shape, self._weight, self._eps)


class HeadNorm:
    """Qwen3's q_norm and k_norm at once: RMSNorm over head_dim, one weight for query and one for key heads."""

    def __init__(self, q_weight_D: Tensor, k_weight_D: Tensor, num_heads: int, num_kv_heads: int, eps: float) -> None:
        self._weight = torch.cat((q_weight_D.expand(num_heads, -1), k_weight_D.expand(num_kv_heads, -1)))
        self._shape = q_weight_D.shape
        self._eps = eps

    def __call__(self, qk_TGD: Tensor) -> Tensor:
        """(T, query heads + key heads, D) -> the same."""
        return F.rms_norm(qk_TGD, self._shape, None, self._eps) * self._weight


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

    def __init__(
        self, config: ModelConfig, layer: int, qkv: Linear, output: Linear, head_norm: HeadNorm | None = None
    ) -> None:
        self._layer = layer
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._scale = config.head_dim**-0.5
        self._window = config.sliding_windows[layer]
        self._qkv = qkv
        self._output = output
        self._head_norm = head_norm

    def __call__(self, x_TI: Tensor, step: Step) -> Tensor:
        """(T, hidden) -> (T, hidden); writes this layer's keys and values into the pool."""
        heads = self._num_heads + self._num_kv_heads
        qkv = self._qkv(x_TI).view(x_TI.shape[0], heads + self._num_kv_heads, self._head_dim)
        qk, v = qkv[:, :heads], qkv[:, heads:]
        if self._head_norm is not None:
            qk = self._head_norm(qk)
        qk = rotate(qk, step.cos, step.sin)
        q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
        out = step.attention.forward(q, k, v, self._layer, step.metadata, step.kv, self._scale, self._window)
        return self._output(out.flatten(1))


class SwiGLU:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x_TI: Tensor) -> Tensor:
        """(T, hidden) -> (T, hidden)."""
        gate, up = self._gate_up(x_TI).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm attention and MLP, each added to the residual stream."""

    input_norm: RMSNorm
    attention: SelfAttention
    post_attention_norm: RMSNorm
    mlp: SwiGLU

    def __call__(self, hidden_TI: Tensor, step: Step) -> Tensor:
        """(T, hidden) -> (T, hidden), new."""
        hidden_TI = self.attention(self.input_norm(hidden_TI), step).add_(hidden_TI)
        return self.mlp(self.post_attention_norm(hidden_TI)).add_(hidden_TI)
