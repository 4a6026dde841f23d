"""Building blocks of the decoder, computed as in transformers 5.x. They are plain callables: nothing here is
trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.generation.layers.lora import DOWN, GATED, OUTPUT, QKV, SITES_A_LAYER, AdapterBatch, SiteAdapters

if TYPE_CHECKING:
    import torch

    from penstock.generation.attention.base import Attention, AttentionLayer, AttentionMetadata
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.layers.experts import MixtureOfExperts
    from penstock.generation.layers.layer_kernels import LayerKernels
    from penstock.generation.layers.linear.base import Linear


class RMSNorm:
    """RMSNorm over the last dimension: float32 inside, rounded once, after the weight."""

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

    def of_addend(self, x_TI: Tensor) -> Tensor:
        """Return the norm of what a layer adds to the stream, in its shape and dtype; may change it in place."""
        return self.kernels.norm_addend(x_TI, self.weight, self.eps)


class RMSNormOnce(RMSNorm):
    """RMSNorm with a weight in float32: rounded once, at its end."""

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.kernels.rms_norm_once(x_TI, self.weight, self.eps)

    @override
    def add(self, hidden_TI: Tensor, pending_TI: Tensor | None) -> Tensor:
        if pending_TI is None:
            return self(hidden_TI)
        return self.kernels.add_rms_norm_once(hidden_TI, pending_TI, self.weight, self.eps)

    @override
    def of_addend(self, x_TI: Tensor) -> Tensor:
        return self.kernels.norm_addend_once(x_TI, self.weight, self.eps)


class LayerNorm(RMSNorm):
    """Cohere's norm: less the mean, no bias, all in float32."""

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        normed_TI = F.layer_norm(x_TI.float(), self.weight.shape, self.weight, None, self.eps)
        return normed_TI.to(self.kernels.normed_dtype(x_TI))

    @override
    def add(self, hidden_TI: Tensor, pending_TI: Tensor | None) -> Tensor:
        return self(hidden_TI if pending_TI is None else hidden_TI.add_(pending_TI))

    @override
    def of_addend(self, x_TI: Tensor) -> Tensor:
        return F.layer_norm(x_TI.float(), self.weight.shape, self.weight, None, self.eps).to(x_TI.dtype)


class NoNorm(RMSNorm):
    """Stand-in for a norm that a model does not have."""

    def __init__(self, kernels: LayerKernels) -> None:
        """Take what knows the dtype of a norm's result."""
        self.kernels = kernels

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        return x_TI.to(self.kernels.normed_dtype(x_TI))

    @override
    def add(self, hidden_TI: Tensor, pending_TI: Tensor | None) -> Tensor:
        return self(hidden_TI if pending_TI is None else hidden_TI.add_(pending_TI))

    @override
    def of_addend(self, x_TI: Tensor) -> Tensor:
        return x_TI


class Multiplied(NoNorm):
    """Granite's factor on a layer's addend to the stream, in place of a norm."""

    def __init__(self, factor: float, kernels: LayerKernels) -> None:
        """Take the factor."""
        super().__init__(kernels)
        self.factor = factor

    @override
    def of_addend(self, x_TI: Tensor) -> Tensor:
        return x_TI.mul_(self.factor)


@dataclass(frozen=True, slots=True)
class Step:
    """Arguments that all layers of one forward pass share."""

    # cos and sin, (T, 1, head_dim / 2) each, of every rotary embedding of the model.
    turns: Sequence[tuple[Tensor, Tensor]]
    metadata: AttentionMetadata
    kv: KVCachePool
    attention: Attention
    # Dtype of the residual stream.
    stream: torch.dtype
    # None: no row has an adapter.
    adapters: AdapterBatch | None = None
    # Vectors of the rows' tokens for each layer (T, layers * dim); None: layers have none.
    inputs_TX: Tensor | None = None

    def linear(self, linear: Linear, x_TI: Tensor, layer: int, site: int) -> Tensor:
        """Return the product of a linear layer, with the adapters' parts where there are some."""
        if self.adapters is None:
            return linear(x_TI)
        number = layer * SITES_A_LAYER + site
        if not self.adapters.changes_site(number):
            return linear(x_TI)
        return linear.adapted(x_TI, SiteAdapters(self.adapters, number))

    def addend(self, linear: Linear, x_TI: Tensor, layer: int, site: int) -> Tensor:
        """Return `linear` in the dtype of the stream that it is added to, not rounded where that is float32."""
        if self.stream is x_TI.dtype:
            return self.linear(linear, x_TI, layer, site)
        number = layer * SITES_A_LAYER + site
        if self.adapters is None or not self.adapters.changes_site(number):
            return linear.as_float(x_TI)
        return linear.adapted_as_float(x_TI, SiteAdapters(self.adapters, number))


class LayerAttention(Protocol):
    """The attention of a decoder layer, of any kind, or what it has in place of it, with its products and its part of
    the pool."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Products that --quantization changes."""

    def __call__(self, x_TI: Tensor, step: Step) -> Tensor:
        """Map (T, hidden) to (T, hidden); write what the layer keeps of these rows into the pool."""


class SelfAttention:
    """Fused qkv, optional head norm, rotary embedding, paged attention, output projection."""

    def __init__(
        self, layer: AttentionLayer, qkv: Linear, output: Linear, turn: int = 0, number: int | None = None
    ) -> None:
        """Take the layer's parts; `turn` is the number of its rotary embedding in Step.turns. `number`: of the layer
        among all; None: that of its keys in the pool."""
        self.layer = layer
        self.number = layer.index if number is None else number
        self.turn = turn
        self.qkv = qkv
        self.output = output

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Both products."""
        return self.qkv, self.output

    def __call__(self, x_TI: Tensor, step: Step) -> Tensor:
        """Map (T, hidden) to (T, hidden); write this layer's keys and values into the pool."""
        layer = self.layer
        qkv = step.linear(self.qkv, x_TI, self.number, QKV)
        cos, sin = step.turns[self.turn]
        metadata = step.metadata
        if step.kv.layout is not None:
            metadata = metadata.view(step.kv.view_of(layer.index))
        out = step.attention.forward_qkv(qkv, cos, sin, layer, metadata, step.kv)
        return step.addend(self.output, out.flatten(1), self.number, OUTPUT)


class SwiGLU:
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, layer: int, gated: Linear, down: Linear) -> None:
        self.gated = gated
        self.down = down
        self._layer = layer

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Both products."""
        return self.gated, self.down

    def __call__(self, x_TI: Tensor, step: Step) -> Tensor:
        """Map (T, hidden) to (T, hidden)."""
        inner = step.linear(self.gated, x_TI, self._layer, GATED)
        return step.addend(self.down, inner, self._layer, DOWN)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm attention and MLP. The next norm adds the output of each to the residual stream, in one pass."""

    input_norm: RMSNorm
    attention: LayerAttention
    post_attention_norm: RMSNorm
    mlp: SwiGLU | MixtureOfExperts

    @property
    def quantisable(self) -> tuple[Linear, ...]:
        """Linear layers that --quantization changes."""
        return (*self.attention.linears, *self.mlp.linears)

    def __call__(self, hidden_TI: Tensor, pending_TI: Tensor | None, step: Step) -> Tensor | None:
        """Run the layer on the residual stream `hidden` + `pending` (None: nothing), both (T, hidden). Changes `hidden`
        in place and returns the tensor that is pending after this layer."""
        normed = self.input_norm.add(hidden_TI, pending_TI)
        return self.mlp(self.post_attention_norm.add(hidden_TI, self.attention(normed, step)), step)


@dataclass(frozen=True, slots=True)
class AroundLayer(DecoderLayer):
    """A layer that also norms, or multiplies, the outputs of attention and MLP before it adds them to the stream."""

    attention_out: RMSNorm
    mlp_out: RMSNorm

    @override
    def __call__(self, hidden_TI: Tensor, pending_TI: Tensor | None, step: Step) -> Tensor | None:
        return self.addend(hidden_TI, pending_TI, step)

    def addend(self, hidden_TI: Tensor, pending_TI: Tensor | None, step: Step) -> Tensor:
        """Return what is pending after attention and MLP."""
        normed = self.input_norm.add(hidden_TI, pending_TI)
        attended = self.attention_out.of_addend(self.attention(normed, step))
        return self.mlp_out.of_addend(self.mlp(self.post_attention_norm.add(hidden_TI, attended), step))


@dataclass(frozen=True, slots=True)
class ParallelLayer(DecoderLayer):
    """A layer with one norm that both attention and MLP read."""

    @override
    def __call__(self, hidden_TI: Tensor, pending_TI: Tensor | None, step: Step) -> Tensor:
        normed = self.input_norm.add(hidden_TI, pending_TI)
        hidden_TI.add_(self.attention(normed, step))
        return self.mlp(normed, step)


class LayerInput:
    """Part of a layer that adds something for a row's token: norm(projection(gelu(gate(stream)) * token's vector))."""

    def __init__(self, gate: Linear, projection: Linear, norm: RMSNorm, first: int, dim: int) -> None:
        """Take the parts; the layer's numbers of Step.inputs_TX are `dim` from `first` on."""
        self.gate = gate
        self.projection = projection
        self.norm = norm
        self._own = slice(first, first + dim)
        self._stream = NoNorm(norm.kernels)

    def __call__(self, hidden_TI: Tensor, pending_TI: Tensor, step: Step) -> Tensor:
        """Add `pending` to the stream `hidden` in place; return what comes next (T, hidden)."""
        assert step.inputs_TX is not None
        gates = self.gate(self._stream.add(hidden_TI, pending_TI))
        inner = self.norm.kernels.gelu_times(gates, step.inputs_TX[:, self._own])
        rounds = step.stream is inner.dtype
        return self.norm.of_addend(self.projection(inner) if rounds else self.projection.as_float(inner))


@dataclass(frozen=True, slots=True)
class ScaledLayer(AroundLayer):
    """A layer that also adds what it has for a row's token, and multiplies the stream by a number of its own."""

    own_input: LayerInput | None
    factor: float

    @property
    @override
    def quantisable(self) -> tuple[Linear, ...]:
        own = self.own_input
        linears = (*self.attention.linears, *self.mlp.linears)
        return linears if own is None else (*linears, own.gate, own.projection)

    @override
    def __call__(self, hidden_TI: Tensor, pending_TI: Tensor | None, step: Step) -> Tensor | None:
        added = self.addend(hidden_TI, pending_TI, step)
        if self.own_input is not None:
            added = self.own_input(hidden_TI, added, step)
        hidden_TI.add_(added).mul_(self.factor)
        return None
