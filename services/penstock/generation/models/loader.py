"""Builds a CausalLM from weights of any origin, one layer at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from penstock.generation.attention.base import HeadWeights
from penstock.generation.core.model_config import ModelConfig
from penstock.generation.layers.decoder_layer import DecoderLayer, RMSNorm, SelfAttention, SwiGLU
from penstock.generation.layers.rope import RotaryEmbedding
from penstock.generation.models.decoder import CausalLM
from penstock.generation.weights.tensor_names import NORM, LayerLinear, layer_linears, layer_prefix, tensor_shapes

if TYPE_CHECKING:
    from penstock.generation.devices.base import Device
    from penstock.generation.layers.kernels import LayerKernels
    from penstock.generation.layers.linear.base import Linear, Rows


class Weights(Protocol):
    """A model's weights on its device. Each part is asked for once, in the order of `build_model`."""

    dtype: torch.dtype
    # Bytes of memory that the parts asked for so far take.
    num_bytes: int

    @property
    def mapped_bytes(self) -> int:
        """Part of `num_bytes` that is used where the page cache has it."""

    @property
    def forms(self) -> Mapping[str, int]:
        """Number of quantised matrices of the checkpoint so far, by the form that they run in: int8, int4 or a dtype's
        name."""

    def head_and_table(self) -> tuple[Linear, Tensor | None]:
        """Return the last layer, and the embedding (vocabulary, hidden); None where it is the head's rows."""

    def linear(self, prefix: str, linear: LayerLinear) -> Linear:
        """Return a linear layer of the decoder layer with the name prefix `prefix`."""

    def tensor(self, name: str) -> Tensor:
        """Return the weight of a norm."""

    def layer_is_complete(self) -> None:
        """Note that nothing more of this layer is asked for."""


def build_model(config: ModelConfig, weights: Weights, device: Device) -> CausalLM:
    """Return the model of `config` with these weights."""
    lm_head, table = weights.head_and_table()
    kernels = device.layer_kernels(weights.dtype)
    layers = [_layer(config, i, weights, kernels) for i in range(config.num_layers)]
    norm = RMSNorm(weights.tensor(NORM), config.rms_norm_eps, kernels)
    config = dataclasses.replace(
        config,
        dtype=str(weights.dtype).removeprefix("torch."),
        num_parameters=sum(math.prod(shape) for shape in tensor_shapes(config).values()),
        weight_forms=tuple(sorted(weights.forms.items())),
    )
    return CausalLM(
        config,
        embedding=table if table is not None else cast("Rows", lm_head.rows()),
        layers=layers,
        norm=norm,
        lm_head=lm_head,
        rotary=RotaryEmbedding(
            config.rope,
            config.head_dim,
            device.torch_device,
            weights.dtype,
            max_positions=config.max_position_embeddings,
        ),
        attention=device.attention(weights.dtype, config.head_dim),
        dtype=weights.dtype,
        device=device.torch_device,
        num_bytes=weights.num_bytes,
        mapped_bytes=weights.mapped_bytes,
    )


def _layer(config: ModelConfig, index: int, weights: Weights, kernels: LayerKernels) -> DecoderLayer:
    prefix = layer_prefix(index)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights.tensor(f"{prefix}{name}.weight"), config.rms_norm_eps, kernels)

    q_norm, k_norm = (
        weights.tensor(f"{prefix}self_attn.{name}_norm.weight") if config.qk_norm else None for name in "qk"
    )
    heads = HeadWeights(config.num_heads, config.num_kv_heads, config.head_dim, q_norm, k_norm, config.rms_norm_eps)
    qkv, output, gated, down = (weights.linear(prefix, linear) for linear in layer_linears(config))
    layer = DecoderLayer(
        norm("input_layernorm"),
        SelfAttention(config, index, qkv, output, heads),
        norm("post_attention_layernorm"),
        SwiGLU(index, gated, down),
    )
    weights.layer_is_complete()
    return layer
