"""Llama, and families that differ from it in a few flags: Mistral, Qwen2 and 3, Phi-3 and Phi-4, Granite, OLMo 2 and 3,
SmolLM3, GLM-4, Cohere."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from penstock.common.logging import get_logger
from penstock.generation.core.model_config import ConfigReader, LayerNorms, ModelConfig, NormKind, RopeConfig
from penstock.generation.layers.rope import read_rope
from penstock.generation.models.family import (
    FULL,
    SLIDING,
    Family,
    always,
    from_field,
    read_layer_types,
    read_rope_of_kind,
    windows_by_layer_type,
    windows_in_turns,
)

_log = get_logger("penstock.generation")

# Llama 2, 3, 3.1, 3.2 and models that share their architecture.
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    qkv_bias=from_field("attention_bias"),
    output_bias=from_field("attention_bias"),
    mlp_bias=from_field("mlp_bias"),
    default_bos=1,
    default_eos=(2,),
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
)


def all_or_no_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Return the windows of a model in which all layers slide, or none. An absent `sliding_window` means the class
    default, null means none. `layer_types` has no effect, as in transformers 5.x."""
    if config.values.get("sliding_window", 4096) is None:
        return (None,) * num_layers
    return (config.integer("sliding_window", 4096),) * num_layers


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    sliding_windows=all_or_no_windows,
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

# Qwen1.5, Qwen2, Qwen2.5.
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    qkv_bias=always,
    sliding_windows=windows_by_layer_type,
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
)

# Dense Qwen3.
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    qkv_bias=from_field("attention_bias"),
    output_bias=from_field("attention_bias"),
    qk_norm=True,
    sliding_windows=windows_by_layer_type,
    default_head_dim=128,
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
)


def rotary_dim_of(config: ConfigReader, head_dim: int, default_factor: float) -> tuple[int, ConfigReader]:
    """Return the dims of a head that turn by `partial_rotary_factor`, and the configuration without that field."""
    values = {key: value for key, value in config.values.items() if key != "partial_rotary_factor"}
    factor = config.number("partial_rotary_factor", default_factor)
    for name in ("rope_parameters", "rope_scaling"):
        scaling = config.mapping(name)
        if scaling is not None:
            factor = scaling.number("partial_rotary_factor", factor)
            values[name] = {key: value for key, value in scaling.values.items() if key != "partial_rotary_factor"}
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise config.unsupported(
            "partial_rotary_factor", f"({factor}) must leave an even number of {head_dim} dims to turn"
        )
    return rotary_dim, ConfigReader(values, config.source, config.prefix)


def _interleaved_rope(
    config: ConfigReader, max_positions: int, head_dim: int, *, default_factor: float, default_theta: float
) -> RopeConfig:
    rotary_dim, rest = rotary_dim_of(config, head_dim, default_factor)
    rope = read_rope(rest, max_positions, default_theta)
    return replace(rope, rotary_dim=0 if rotary_dim == head_dim else rotary_dim, is_interleaved=True)


def _phi3_rope(config: ConfigReader, max_positions: int, head_dim: int) -> RopeConfig:
    rotary_dim, rest = rotary_dim_of(config, head_dim, 1.0)
    name = "rope_scaling" if rest.values.get("rope_scaling") else "rope_parameters"
    scaling = rest.mapping(name)
    if scaling is None or scaling.text("rope_type", scaling.text("type", "default")) == "default":
        rope = read_rope(rest, max_positions)
    else:
        rope = read_longrope(rest, scaling, max_positions, rotary_dim)
    return replace(rope, rotary_dim=0 if rotary_dim == head_dim else rotary_dim)


def read_longrope(config: ConfigReader, scaling: ConfigReader, max_positions: int, rotary_dim: int) -> RopeConfig:
    """Read longrope up to the original training length. `_finish_phi3` ends the context there: beyond it transformers
    turns a whole sequence by other frequencies, its earlier keys included."""
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    # Old names of it.
    if rope_type not in ("longrope", "su", "yarn"):
        raise scaling.unsupported("rope_type", f"{rope_type!r} is not supported; supported are default, longrope")
    own = scaling.integer("original_max_position_embeddings", 4096)
    original = config.integer("original_max_position_embeddings", own)
    divisors = scaling.numbers("short_factor")
    if len(divisors) != rotary_dim // 2:
        raise scaling.error("short_factor", f"has {len(divisors)} numbers, {rotary_dim} dims turn in pairs")
    factor = scaling.number("factor", max_positions / original)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        "longrope",
        scaling.number("rope_theta", config.number("rope_theta", 10_000.0)),
        original_max_position_embeddings=original,
        attention_factor=scaling.number("attention_factor", magnitude),
        divisors=divisors,
    )


def _finish_phi3(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    model = replace(model, qkv_is_one=True, gate_up_is_one=True)
    original = model.rope.original_max_position_embeddings
    if model.rope.rope_type != "longrope" or original >= model.max_position_embeddings:
        return model
    _log.warning(
        "the context ends where longrope changes its frequencies",
        context=original,
        max_position_embeddings=model.max_position_embeddings,
    )
    return replace(model, max_position_embeddings=original)


def _phi3_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    return (config.optional_integer("sliding_window", minimum=1),) * num_layers


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    sliding_windows=_phi3_windows,
    rope=_phi3_rope,
    finish=_finish_phi3,
    default_eps=1e-5,
    default_bos=1,
    default_eos=(32000,),
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
    },
)


def _finish_granite(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    return replace(
        model,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        scales_given_embeds=True,
        attention_scale=config.number("attention_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    qkv_bias=from_field("attention_bias"),
    output_bias=from_field("attention_bias"),
    mlp_bias=from_field("mlp_bias"),
    finish=_finish_granite,
    default_bos=1,
    default_eos=(2,),
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
)
_NORMS_AFTER = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _finish_olmo(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    return replace(model, norms=_NORMS_AFTER, norm_kind=NormKind.RMS_ROUNDED_ONCE, qk_norm_is_whole=True)


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    qkv_bias=from_field("attention_bias"),
    output_bias=from_field("attention_bias"),
    qk_norm=True,
    finish=_finish_olmo,
    default_eps=1e-5,
    default_eos=(50279,),
    defaults={
        "vocab_size": 50304,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
)


def _olmo3_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    return windows_in_turns(config, num_layers, default_window=4096, period=4)


def _olmo3_rope(config: ConfigReader, max_positions: int, head_dim: int) -> RopeConfig:
    return read_rope_of_kind(config, max_positions, FULL, config.number("rope_theta", 500_000.0))


def _finish_olmo3(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    local = read_rope_of_kind(config, model.max_position_embeddings, SLIDING, 500_000.0)
    ropes = tuple(model.rope if window is None else local for window in model.sliding_windows)
    return replace(_finish_olmo(config, model), layer_ropes=ropes)


OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    sliding_windows=_olmo3_windows,
    rope=_olmo3_rope,
    finish=_finish_olmo3,
)


def _no_rope_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Read the layers of SmolLM3 with rotary embedding: `no_rope_layers` has 1 for them."""
    turns = config.whole_numbers("no_rope_layers")
    if turns is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(turns) < num_layers:
        raise config.error("no_rope_layers", f"has {len(turns)} entries, num_hidden_layers is {num_layers}")
    return tuple(map(bool, turns[:num_layers]))


def _smollm3_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    window = config.optional_integer("sliding_window", minimum=1)
    if not config.boolean("use_sliding_window", False) or window is None:
        return (None,) * num_layers
    types = read_layer_types(config, num_layers)
    if types is None:
        types = tuple(FULL if turns else SLIDING for turns in _no_rope_layers(config, num_layers))
    return tuple(window if one == SLIDING else None for one in types)


def _finish_smollm3(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    turns = _no_rope_layers(config, model.num_layers)
    return replace(model, layer_ropes=tuple(model.rope if one else None for one in turns))


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    qkv_bias=from_field("attention_bias"),
    output_bias=from_field("attention_bias"),
    mlp_bias=from_field("mlp_bias"),
    sliding_windows=_smollm3_windows,
    finish=_finish_smollm3,
    default_theta=2_000_000.0,
    default_tied=True,
    default_bos=128000,
    default_eos=(128001,),
    defaults={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
)


def _glm_bias(config: ConfigReader) -> bool:
    return config.boolean("attention_bias", True)


def _finish_glm(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    return replace(model, gate_up_is_one=True)


GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    qkv_bias=_glm_bias,
    rope=partial(_interleaved_rope, default_factor=0.5, default_theta=10_000.0),
    finish=_finish_glm,
    default_eps=1.5625e-7,
    default_head_dim=128,
    default_eos=(151329, 151336, 151338),
    defaults={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
    },
)
_GLM4_NORMS = LayerNorms(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)


def _finish_glm4(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    return replace(_finish_glm(config, model), norms=_GLM4_NORMS)


GLM4 = replace(GLM, model_type="glm4", architecture="Glm4ForCausalLM", finish=_finish_glm4)


def _finish_cohere(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    if config.boolean("use_qk_norm", False):
        raise config.unsupported("use_qk_norm", "is not supported: its weights differ from head to head")
    return replace(
        model,
        norms=LayerNorms("input_layernorm", None, None, None),
        norm_kind=NormKind.LAYER,
        is_parallel=True,
        logit_scale=config.number("logit_scale", 0.0625),
    )


COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    qkv_bias=from_field("attention_bias"),
    output_bias=from_field("attention_bias"),
    rope=partial(_interleaved_rope, default_factor=1.0, default_theta=500_000.0),
    finish=_finish_cohere,
    eps_field="layer_norm_eps",
    default_eps=1e-5,
    default_tied=True,
    default_bos=5,
    default_eos=(255001,),
    defaults={
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
    },
)


def _cohere2_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    period = config.integer("sliding_window_pattern", 4)
    return windows_in_turns(config, num_layers, default_window=4096, period=period)


def _finish_cohere2(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    ropes = tuple(None if window is None else model.rope for window in model.sliding_windows)
    return replace(_finish_cohere(config, model), layer_ropes=ropes)


COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    rope=partial(_interleaved_rope, default_factor=1.0, default_theta=10_000.0),
    sliding_windows=_cohere2_windows,
    finish=_finish_cohere2,
)
