"""Builds a CausalLM from weights of any origin, one layer at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from penstock.common.dtypes import dtype_name
from penstock.generation.attention.base import AttentionLayer
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.core.model_config import ModelConfig, NormKind
from penstock.generation.layers.decoder_layer import (
    AroundLayer,
    DecoderLayer,
    LayerInput,
    LayerNorm,
    Multiplied,
    NoNorm,
    ParallelLayer,
    RMSNorm,
    RMSNormOnce,
    ScaledLayer,
    SelfAttention,
    SwiGLU,
)
from penstock.generation.layers.delta_net import DeltaNet
from penstock.generation.layers.delta_rule import DeltaRule, DeltaWeights, NativeDeltaRule
from penstock.generation.layers.expert_choice import choice_of
from penstock.generation.layers.experts import MixtureOfExperts, SharedExpert
from penstock.generation.layers.gated_attention import GatedAttention
from penstock.generation.layers.index_choice import IndexChoice, NativeIndexChoice
from penstock.generation.layers.indexer import Indexer
from penstock.generation.layers.latent_attention import DirectQueries, LatentAttention, LowRankQueries, Queries
from penstock.generation.layers.layer_kernels import InputNorm, NativeKernels
from penstock.generation.layers.rope import RotaryEmbedding
from penstock.generation.layers.sparse_latent import SparseLatentAttention
from penstock.generation.layers.summed import SummedAttention, SummedMLP
from penstock.generation.layers.token_inputs import TokenInputs
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.loaded_weights import Weights
from penstock.generation.models.model_parts import PartsKeeper
from penstock.generation.weights.tensor_names import (
    DELTA_BIAS,
    DELTA_CONV,
    DELTA_DECAY,
    DELTA_NORM,
    INDEX_NORM,
    INPUT_NORM,
    INPUT_OUT_NORM,
    INPUT_TABLE,
    LATENT_NORM,
    LAYER_SCALAR,
    MODEL_PREFIX,
    NORM,
    QUERY_NORM,
    LayerLinear,
    attention_linears,
    choice_biases,
    head_dims,
    index_linears,
    input_linears,
    layer_prefix,
    mlp_linears,
    model_linears,
    rounds_once,
    tensor_shapes,
)

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention
    from penstock.generation.core.index_heads import IndexHeads
    from penstock.generation.core.latent_heads import LatentHeads
    from penstock.generation.devices.base import Device
    from penstock.generation.layers.decoder_layer import LayerAttention
    from penstock.generation.layers.layer_kernels import LayerKernels
    from penstock.generation.layers.linear.base import Linear, Rows
    from penstock.generation.layers.summed import Sum


def build_model(config: ModelConfig, weights: Weights, device: Device, sum_parts: Sum | None = None) -> CausalLM:
    """Return the model of `config` with these weights. `sum_parts`: they are a part of a model in several processes,
    and it adds up the results of the parts; None: they are the whole model."""
    keeper = PartsKeeper(weights)
    lm_head, table = keeper.head_and_table()
    parts = LayerMaker(config, keeper, device.layer_kernels(weights.dtype), sum_parts)
    token_inputs = parts.token_inputs(weights.dtype)
    layers = [parts.layer(i) for i in range(config.num_layers)]
    norm = parts.norm(NORM)
    config = dataclasses.replace(
        config,
        dtype=dtype_name(weights.dtype),
        num_parameters=sum(math.prod(shape) for shape in tensor_shapes(config).values()),
        weight_forms=tuple(sorted(weights.forms.items())),
    )
    return CausalLM(
        config,
        embedding=table if table is not None else cast("Rows", lm_head.rows()),
        layers=layers,
        norm=norm,
        lm_head=lm_head,
        rotaries=parts.rotaries(device),
        attention=attention_of(config, weights.dtype, device),
        dtype=weights.dtype,
        device=device.torch_device,
        num_bytes=weights.num_bytes + copied_bytes(layers),
        mapped_bytes=weights.mapped_bytes,
        parts=keeper.parts,
        token_inputs=token_inputs,
    )


def copied_bytes(layers: Sequence[DecoderLayer]) -> int:
    """Return the memory that layers take beside their weights."""
    attentions = (layer.attention for layer in layers)
    return sum(one.copied_bytes for one in attentions if isinstance(one, LatentAttention))


def attention_of(config: ModelConfig, dtype: torch.dtype, device: Device) -> Attention:
    """Return the attention of a model's layers."""
    if config.layer_shapes and device.torch_device.type != "cpu":
        # Accelerators' own operators are chosen by one width of heads, and take no slots that layers share.
        return SDPAAttention()
    return device.attention(dtype, config.widest_head)


class LayerMaker:
    """Maker of a model's layers from its weights."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: LayerKernels, sum_parts: Sum | None = None
    ) -> None:
        self._config, self._weights, self._kernels = config, weights, kernels
        self._sum = sum_parts
        # Rotary embeddings of the layers, with their widths; and each of the model's once.
        layer_ropes = config.layer_ropes or (config.rope,) * config.num_layers
        kinds = [(rope, config.rope_width(layer)) for layer, rope in enumerate(layer_ropes)]
        self._ropes = list(dict.fromkeys(kinds))
        self._turns = [self._ropes.index(kind) for kind in kinds]

    def rotaries(self, device: Device) -> list[RotaryEmbedding]:
        """Return the model's rotary embeddings, each once; layers refer to them by place."""
        most = self._config.max_position_embeddings
        return [
            RotaryEmbedding(rope, width, device.torch_device, self._weights.dtype, max_positions=most)
            for rope, width in self._ropes
        ]

    def norm(self, name: str) -> RMSNorm:
        """Return a norm over the hidden size by the name of its weight."""
        kinds = {NormKind.RMS: RMSNorm, NormKind.RMS_ROUNDED_ONCE: RMSNormOnce, NormKind.LAYER: LayerNorm}
        return kinds[self._config.norm_kind](self._norm_weight(name), self._config.rms_norm_eps, self._kernels)

    def layer(self, index: int) -> DecoderLayer:
        """Return a decoder layer."""
        config, prefix, names = self._config, layer_prefix(index), self._config.norms
        before = [self._norm_in(prefix, names.before_attention), self._norm_in(prefix, names.before_mlp)]
        after = [self._norm_after(prefix, name) for name in (names.after_attention, names.after_mlp)]
        attention = self._attention(index, prefix)
        rest = mlp_linears(config, index)
        mlp = self._mixture(index, prefix, rest) if config.has_experts(index) else self._mlp(index, prefix, rest)
        if config.has_layer_scalars:
            assert isinstance(mlp, SwiGLU)
            factor = float(self._weights.tensor(f"{prefix}{LAYER_SCALAR}", is_exact=True))
            own_input = self._input(index, prefix)
            self._weights.layer_is_complete()
            return ScaledLayer(before[0], attention, before[1], mlp, after[0], after[1], own_input, factor)
        self._weights.layer_is_complete()
        if config.is_parallel:
            return ParallelLayer(before[0], attention, before[1], mlp)
        if all(type(norm) is NoNorm for norm in after):
            return DecoderLayer(before[0], attention, before[1], mlp)
        return AroundLayer(before[0], attention, before[1], mlp, *after)

    def _input(self, index: int, prefix: str) -> LayerInput | None:
        """Return what a layer adds for a row's token; None: nothing."""
        inputs = self._config.layer_inputs
        if inputs is None:
            return None
        gate, projection = (self._linear(prefix, one) for one in input_linears(self._config))
        return LayerInput(gate, projection, self.norm(f"{prefix}{INPUT_OUT_NORM}"), index * inputs.dim, inputs.dim)

    def token_inputs(self, dtype: torch.dtype) -> TokenInputs | None:
        """Return what makes the vectors of tokens; None: the model has none."""
        inputs = self._config.layer_inputs
        if inputs is None:
            return None
        table, (product,) = self._weights.token_table(INPUT_TABLE), model_linears(self._config)
        norm = InputNorm(
            self._norm_weight(INPUT_NORM),
            self._config.rms_norm_eps,
            product_factor=self._config.hidden_size**-0.5,
            # In the model's dtype, as in transformers.
            row_factor=float(torch.tensor(inputs.dim**0.5, dtype=dtype)),
            factor=2.0**-0.5,
        )
        return TokenInputs(table, self._linear(MODEL_PREFIX, product), norm, self._kernels)

    def _attention(self, index: int, prefix: str) -> LayerAttention:
        if self._config.keeps_state(index):
            return self._delta_net(index, prefix)
        layer = self._attention_layer(index, prefix)
        if self._config.latent is not None:
            return self._latent(index, layer, prefix)
        qkv, output = (self._linear(prefix, one) for one in attention_linears(self._config, index))
        turn = self._turns[index]
        if self._config.has_gates:
            return GatedAttention(index, layer, qkv, output, self._kernels, turn)
        if self._sum is None:
            return SelfAttention(layer, qkv, output, turn, index)
        return SummedAttention(layer, qkv, output, turn, self._sum)

    def _delta_net(self, index: int, prefix: str) -> DeltaNet:
        heads = self._config.delta
        assert heads is not None

        def tensor(name: str) -> Tensor:
            return self._weights.tensor(f"{prefix}{name}", is_exact=True)

        rows, numbers, output = (self._linear(prefix, one) for one in attention_linears(self._config, index))
        weights = DeltaWeights(
            conv=tensor(DELTA_CONV).squeeze(1).t().contiguous(),
            decay=tensor(DELTA_DECAY).exp(),
            bias=tensor(DELTA_BIAS),
            norm=tensor(DELTA_NORM),
            eps=self._config.rms_norm_eps,
        )
        rule = NativeDeltaRule() if isinstance(self._kernels, NativeKernels) else DeltaRule()
        return DeltaNet(index, heads, rule, weights, rows, numbers, output)

    def _latent(self, index: int, layer: AttentionLayer, prefix: str) -> LatentAttention:
        config, latent = self._config, self._config.latent
        assert latent is not None

        def norm(name: str) -> RMSNorm:
            return RMSNorm(self._norm_weight(f"{prefix}{name}.weight"), latent.eps, self._kernels)

        *made, row, expansion, output = attention_linears(config)
        queries: Queries
        if latent.query_rank:
            down, up = (self._linear(prefix, one) for one in made)
            queries = LowRankQueries(down, norm(QUERY_NORM), up)
        else:
            queries = DirectQueries(self._linear(prefix, made[0]))
        parts = (
            self._linear(prefix, row),
            norm(LATENT_NORM),
            self._weights.matrix(prefix, expansion),
            self._linear(prefix, output),
            self._turns[layer.index],
        )
        if config.index is None:
            return LatentAttention(layer, latent, queries, *parts)
        assert isinstance(queries, LowRankQueries)
        indexer = self._indexer(index, prefix, config.index, latent)
        return SparseLatentAttention(layer, latent, queries, *parts, config.index.most, indexer)

    def _indexer(self, index: int, prefix: str, heads: IndexHeads, latent: LatentHeads) -> Indexer | None:
        """Return the indexer of a layer; None: it has none."""
        made = [self._linear(prefix, one) for one in index_linears(self._config, index)]
        if not made:
            return None
        queries, keys, weights = made
        norm = self._weights.tensor(f"{prefix}{INDEX_NORM}.weight"), self._weights.tensor(f"{prefix}{INDEX_NORM}.bias")
        choice = NativeIndexChoice() if isinstance(self._kernels, NativeKernels) else IndexChoice()
        return Indexer(heads.place(index), heads, latent.turned_dim, queries, keys, norm, weights, choice)

    def _norm_weight(self, name: str) -> Tensor:
        weight = self._weights.tensor(name, is_exact=rounds_once(self._config))
        return weight + self._config.norm_offset if self._config.norm_offset else weight

    def _norm_in(self, prefix: str, name: str | None) -> RMSNorm:
        return NoNorm(self._kernels) if name is None else self.norm(f"{prefix}{name}.weight")

    def _norm_after(self, prefix: str, name: str | None) -> RMSNorm:
        if name is None and self._config.residual_scale != 1.0:
            return Multiplied(self._config.residual_scale, self._kernels)
        return self._norm_in(prefix, name)

    def _attention_layer(self, index: int, prefix: str) -> AttentionLayer:
        config, shape = self._config, self._config.shape(index)
        reads_only = shape.source is not None
        q_norm = self._head_norm(f"{prefix}self_attn.q_norm.weight")
        k_norm = None if reads_only else self._head_norm(f"{prefix}self_attn.k_norm.weight")
        return AttentionLayer(
            config.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            config.kv_place(index),
            config.sliding_windows[index],
            q_norm=q_norm,
            k_norm=k_norm,
            eps=config.rms_norm_eps,
            norm_is_whole=config.qk_norm_is_whole,
            softcap=config.attention_softcap,
            sinks=self._weights.tensor(f"{prefix}self_attn.sinks", is_exact=True) if config.has_sinks else None,
            value_dim=0 if config.latent is None else config.latent.rank,
            norms_values=config.norms_values,
            values_are_keys=shape.values_are_keys,
            reads_only=reads_only,
        )

    def _head_norm(self, name: str) -> Tensor | None:
        """Return the weight of a norm of heads, its dims in the order of the heads'; None: the model has none."""
        if not self._config.qk_norm:
            return None
        weight, dims = self._norm_weight(name), head_dims(self._config)
        return weight if dims is None or self._config.qk_norm_is_whole else weight[list(dims)]

    def _linear(self, prefix: str, linear: LayerLinear) -> Linear:
        return self._weights.linear(prefix, linear, self._config.activation)

    def _mlp(self, index: int, prefix: str, linears: Sequence[LayerLinear]) -> SwiGLU:
        gated, down = (self._linear(prefix, one) for one in linears)
        return SwiGLU(index, gated, down) if self._sum is None else SummedMLP(index, gated, down, self._sum)

    def _mixture(self, index: int, prefix: str, linears: Sequence[LayerLinear]) -> MixtureOfExperts:
        experts = self._config.experts
        assert experts is not None
        router, *made = (self._linear(prefix, one) for one in linears)
        biases = [self._weights.tensor(f"{prefix}{name}", is_exact=True) for name in choice_biases(self._config, index)]
        choice = choice_of(experts, next(iter(biases), None), self._kernels)
        end = 2 * experts.count
        pairs = list(zip(made[:end:2], made[1:end:2], strict=True))
        shared = SharedExpert(*made[end:]) if made[end:] else None
        return MixtureOfExperts(experts, router, pairs, shared, choice)
