"""All layers of a model as one call of the C++ kernels (csrc/ops_decoder.cpp): the bits of the layers one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from penstock.generation.attention.native import NativeAttention
from penstock.generation.models.kernels import NativeKernels
from penstock.generation.quantization.native import NativeLinear

if TYPE_CHECKING:
    from penstock.generation.models.config import ModelConfig
    from penstock.generation.models.layers import DecoderLayer, Step


class FusedLayers:
    """Threads go through the layers together; between two operations they meet instead of being woken anew."""

    def __init__(self, config: ModelConfig, layers: Sequence[DecoderLayer]) -> None:
        """`layers` must be `can_fuse`."""
        first = cast(NativeLinear, layers[0].mlp.gated)
        sizes = [first.format, config.hidden_size, config.intermediate_size]
        sizes += [config.num_heads, config.num_kv_heads, config.head_dim]
        tensors = [tensor for layer in layers for tensor in _tensors(layer)]
        windows = [layer.attention.window or 0 for layer in layers]
        decoder: Any = torch.classes.penstock.Decoder(sizes, config.rms_norm_eps, tensors, windows)
        self._forward = decoder.forward

    def __call__(self, hidden_TI: Tensor, step: Step) -> Tensor:
        """What is pending after the last layer, (T, hidden); `hidden` holds the rest of the residual stream."""
        metadata, kv = step.metadata, step.kv
        pending: Tensor = self._forward(
            hidden_TI,
            step.cos,
            step.sin,
            metadata.slot_mapping,
            metadata.block_tables,
            metadata.query_start,
            metadata.context_lens,
            *kv.tensors,
        )
        return pending


def can_fuse(config: ModelConfig, layers: Sequence[DecoderLayer], attention: object) -> bool:
    """Whether everything is native, and no width needs padding."""
    if not layers or not isinstance(attention, NativeAttention):
        return False
    native = all(
        isinstance(linear, NativeLinear)
        for layer in layers
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gated, layer.mlp.down)
    )
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    return (
        native
        and all(isinstance(layer.input_norm.kernels, NativeKernels) for layer in layers)
        and all(width % 2 == 0 for width in widths)
    )


def _tensors(layer: DecoderLayer) -> list[Tensor | None]:
    heads = layer.attention.heads
    found = [layer.input_norm.weight, layer.post_attention_norm.weight, heads.q_norm, heads.k_norm]
    for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gated, layer.mlp.down):
        found += cast(NativeLinear, linear).tensors()
    return found
