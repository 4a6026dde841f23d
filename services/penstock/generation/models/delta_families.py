"""Families with a gated delta rule in most layers and gated attention in the others: Qwen3.5, dense and with experts,
and Qwen3-Next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from penstock.generation.core.delta_heads import DeltaHeads
from penstock.generation.core.model_config import (
    MAX_LAYERS,
    ConfigReader,
    Experts,
    ModelConfig,
    NormKind,
    RopeConfig,
)
from penstock.generation.layers.rope import read_rope
from penstock.generation.models.dense_families import rotary_dim_of
from penstock.generation.models.family import FULL, Family, always, from_field
from penstock.generation.models.mixtures import count_experts, layers_with_experts

# Kind of a layer in `layer_types`, beside FULL.
_LINEAR = "linear_attention"
_PERIOD = 4


def _rope(config: ConfigReader, max_positions: int, head_dim: int) -> RopeConfig:
    """Read the rotary embedding. Its sections of time, height and width turn alike in text."""
    rotary_dim, rest = rotary_dim_of(config, head_dim, 0.25)
    return replace(read_rope(rest, max_positions), rotary_dim=0 if rotary_dim == head_dim else rotary_dim)


def _delta_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Tell which layers keep a state: by `layer_types`, else all but every `full_attention_interval`th."""
    types = config.values.get("layer_types")
    if types is None:
        period = config.integer("full_attention_interval", _PERIOD)
        return tuple((layer + 1) % period != 0 for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or not {*map(str, types)} <= {_LINEAR, FULL}:
        raise config.error("layer_types", f"must list {_LINEAR!r} or {FULL!r} for each of {num_layers} layers")
    return tuple(one == _LINEAR for one in types)


def _delta(config: ConfigReader, model: ModelConfig, *, by_key_head: bool) -> ModelConfig:
    layers = _delta_layers(config, model.num_layers)
    if all(layers):
        raise config.unsupported("layer_types", f"without {FULL!r} is not supported")
    key_heads = config.integer("linear_num_key_heads", 16)
    value_heads = config.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise config.error(
            "linear_num_value_heads", f"({value_heads}) is not a multiple of linear_num_key_heads ({key_heads})"
        )
    heads = DeltaHeads(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.integer("linear_key_head_dim", 128),
        value_dim=config.integer("linear_value_head_dim", 128),
        kernel=config.integer("linear_conv_kernel_dim", 4, maximum=_MOST_TAPS),
        layers=layers,
        by_key_head=by_key_head,
    )
    return replace(
        model,
        norm_kind=NormKind.RMS_ROUNDED_ONCE,
        norm_offset=1.0,
        has_gates=True,
        # Most configurations do not tell: a checkpoint has them, or has not.
        num_draft_layers=config.integer("mtp_num_hidden_layers", 1, minimum=0, maximum=MAX_LAYERS),
        drafts_are_layers=False,
        # All layers alike: none of them keeps a state.
        delta=heads if any(layers) else None,
    )


# Rows of a convolution: a state keeps them in every layer.
_MOST_TAPS = 64


def _finish_dense(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    return _delta(config, model, by_key_head=False)


def _finish_experts(
    config: ConfigReader,
    model: ModelConfig,
    *,
    by_key_head: bool,
    count: int,
    per_row: int,
    sums_to_one: Callable[[ConfigReader], bool],
    layers: Callable[[ConfigReader, int], tuple[bool, ...]],
) -> ModelConfig:
    count, per_row = count_experts(config, count, per_row)
    experts = Experts(
        count,
        per_row,
        config.integer("moe_intermediate_size", 512),
        sums_to_one=sums_to_one(config),
        layers=layers(config, model.num_layers),
        shared_inner=config.integer("shared_expert_intermediate_size", 512),
    )
    return replace(_delta(config, model, by_key_head=by_key_head), experts=experts)


def _family(
    model_type: str,
    architecture: str,
    finish: Callable[[ConfigReader, ModelConfig], ModelConfig],
    defaults: Mapping[str, int],
) -> Family:
    return Family(
        model_type=model_type,
        architecture=architecture,
        qkv_bias=from_field("attention_bias"),
        output_bias=from_field("attention_bias"),
        qk_norm=True,
        rope=_rope,
        finish=finish,
        default_head_dim=256,
        defaults={"num_attention_heads": 16, "max_position_embeddings": 32768, **defaults},
    )


QWEN3_5 = _family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _finish_dense,
    {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
)


def _every_layer(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    return (True,) * num_layers


QWEN3_5_MOE = _family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    partial(_finish_experts, by_key_head=False, count=256, per_row=8, sums_to_one=always, layers=_every_layer),
    {
        "vocab_size": 248320,
        "hidden_size": 2048,
        # Of no layer: all have experts.
        "intermediate_size": 512,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
    },
)


def _norm_topk(config: ConfigReader) -> bool:
    return config.boolean("norm_topk_prob", True)


QWEN3_NEXT = _family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    partial(
        _finish_experts,
        by_key_head=True,
        count=512,
        per_row=10,
        sums_to_one=_norm_topk,
        layers=layers_with_experts,
    ),
    {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
    },
)
