"""Families with a mixture of experts: Mixtral, Qwen2-MoE, Qwen3-MoE and gpt-oss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from penstock.generation.core.model_config import (
    Activation,
    ConfigReader,
    Experts,
    ModelConfig,
    NormKind,
    RopeConfig,
)
from penstock.generation.layers.rope import read_rope
from penstock.generation.models.dense_families import QWEN3
from penstock.generation.models.family import Family, read_layer_types, windows_in_turns

# No model has more. The names of all of their tensors are made before weights are read.
MOST_EXPERTS = 1024


def count_experts(config: ConfigReader, default_count: int, default_per_row: int) -> tuple[int, int]:
    """Return the number of experts and how many of them a row has, under either name of the first."""
    field = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    count = config.integer(field, default_count, maximum=MOST_EXPERTS)
    per_row = config.integer("num_experts_per_tok", default_per_row)
    if per_row > count:
        raise config.error("num_experts_per_tok", f"({per_row}) is more than {field} ({count})")
    return count, per_row


def _mixtral_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    return (config.optional_integer("sliding_window", minimum=1),) * num_layers


def _finish_mixtral(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    count, per_row = count_experts(config, 8, 2)
    return replace(
        model,
        experts=Experts(
            count,
            per_row,
            model.intermediate_size,
            sums_to_one=True,
            layers=(True,) * model.num_layers,
            module="block_sparse_moe",
            parts=("w1", "w3", "w2"),
        ),
    )


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    sliding_windows=_mixtral_windows,
    finish=_finish_mixtral,
    default_theta=1_000_000.0,
    default_eps=1e-5,
    default_bos=1,
    default_eos=(2,),
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
)


def layers_with_experts(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Tell which layers have experts: every `decoder_sparse_step`th one, except those in `mlp_only_layers`."""
    plain = config.whole_numbers("mlp_only_layers") or ()
    step = config.integer("decoder_sparse_step", 1)
    return tuple((layer + 1) % step == 0 and layer not in plain for layer in range(num_layers))


def _finish_qwen(
    config: ConfigReader, model: ModelConfig, *, count: int, per_row: int, inner: int, shared_inner: int
) -> ModelConfig:
    count, per_row = count_experts(config, count, per_row)
    return replace(
        model,
        experts=Experts(
            count,
            per_row,
            config.integer("moe_intermediate_size", inner),
            sums_to_one=config.boolean("norm_topk_prob", False),
            layers=layers_with_experts(config, model.num_layers),
            shared_inner=config.integer("shared_expert_intermediate_size", shared_inner) if shared_inner else 0,
        ),
    )


def _qwen2_moe_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Windows by transformers 5.x's rule: every second layer below `max_window_layers`, or by `layer_types`."""
    if not config.boolean("use_sliding_window", False):
        return (None,) * num_layers
    if read_layer_types(config, num_layers) is not None:
        return windows_in_turns(config, num_layers, default_window=4096, period=2)
    window = config.integer("sliding_window", 4096)
    last = config.integer("max_window_layers", 28, minimum=0)
    return tuple(window if layer % 2 == 0 and layer < last else None for layer in range(num_layers))


def _qkv_bias(config: ConfigReader) -> bool:
    return config.boolean("qkv_bias", True)


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    qkv_bias=_qkv_bias,
    sliding_windows=_qwen2_moe_windows,
    finish=partial(_finish_qwen, count=60, per_row=4, inner=1408, shared_inner=5632),
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
    },
)


def _qwen3_moe_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Windows of Qwen3-MoE in transformers 5.x: all layers slide, or none."""
    if not config.boolean("use_sliding_window", False):
        return (None,) * num_layers
    return (config.integer("sliding_window", 4096),) * num_layers


QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    sliding_windows=_qwen3_moe_windows,
    default_head_dim=None,
    finish=partial(_finish_qwen, count=128, per_row=8, inner=768, shared_inner=0),
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
)


def _gpt_oss_rope(config: ConfigReader, max_positions: int, head_dim: int) -> RopeConfig:
    """Read the rotary embedding; the class's own default is yarn."""
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = ConfigReader({**config.values, "rope_parameters": _YARN}, config.source, config.prefix)
    return read_rope(config, max_positions, 150_000.0)


_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _finish_gpt_oss(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    for field, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if config.number(field, only) != only:
            raise config.unsupported(field, f"other than {only} is not supported")
    count, per_row = count_experts(config, 128, 4)
    return replace(
        model,
        norm_kind=NormKind.RMS_ROUNDED_ONCE,
        activation=Activation.CLAMPED,
        has_sinks=True,
        experts=Experts(
            count,
            per_row,
            model.intermediate_size,
            sums_to_one=True,
            layers=(True,) * model.num_layers,
            router="router",
            is_stacked=True,
        ),
    )


def _biased(config: ConfigReader) -> bool:
    return config.boolean("attention_bias", True)


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    qkv_bias=_biased,
    output_bias=_biased,
    sliding_windows=partial(windows_in_turns, default_window=128, period=2),
    rope=_gpt_oss_rope,
    finish=_finish_gpt_oss,
    default_eps=1e-5,
    default_head_dim=64,
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
)
