"""Gemma 2 and Gemma 3 (text): norms before and after, scaled embedding, gelu, alternating windows; Gemma 2 caps its
scores and logits, Gemma 3 norms the heads and turns full and sliding layers by different rotary embeddings."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from penstock.generation.core.model_config import ConfigReader, LayerNorms, ModelConfig, NormKind, RopeConfig
from penstock.generation.models.family import (
    FULL,
    SLIDING,
    Family,
    from_field,
    read_layer_types,
    read_rope_of_kind,
    windows_in_turns,
)

NORMS = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def _finish(config: ConfigReader, model: ModelConfig, *, score_cap: float, logit_cap: float) -> ModelConfig:
    """Set the common fields. The caps are the defaults of the configuration classes, 0 for none."""
    if config.boolean("use_bidirectional_attention", False):
        raise config.unsupported("use_bidirectional_attention", "is not supported: rows see only earlier positions")
    return replace(
        model,
        norms=NORMS,
        norm_kind=NormKind.RMS_ROUNDED_ONCE,
        norm_offset=1.0,
        embedding_scale=math.sqrt(model.hidden_size),
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=read_cap(config, "attn_logit_softcapping", score_cap),
        logit_softcap=read_cap(config, "final_logit_softcapping", logit_cap),
    )


def read_cap(config: ConfigReader, field: str, default: float) -> float:
    """Read a soft cap; 0 when it is null, or absent without a default."""
    if config.values.get(field, default or None) is None:
        return 0.0
    return config.number(field, default)


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    qkv_bias=from_field("attention_bias"),
    output_bias=from_field("attention_bias"),
    sliding_windows=partial(windows_in_turns, default_window=4096, period=2),
    activation_field="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    default_head_dim=256,
    default_tied=True,
    default_bos=2,
    default_eos=(1,),
    finish=partial(_finish, score_cap=50.0, logit_cap=30.0),
    defaults={
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
    },
)


def _types(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    period = config.integer("sliding_window_pattern", 6)
    found = read_layer_types(config, num_layers)
    return found or tuple(SLIDING if (layer + 1) % period else FULL for layer in range(num_layers))


def _gemma3_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    window = config.integer("sliding_window", 4096)
    return tuple(window if one == SLIDING else None for one in _types(config, num_layers))


def _full_rope(config: ConfigReader, max_positions: int, head_dim: int) -> RopeConfig:
    return read_rope_of_kind(config, max_positions, FULL, config.number("rope_theta", 1e6))


def _finish_gemma3(config: ConfigReader, model: ModelConfig) -> ModelConfig:
    theta = config.number("rope_local_base_freq", 10_000.0)
    local = read_rope_of_kind(config, model.max_position_embeddings, SLIDING, theta)
    types = _types(config, model.num_layers)
    model = replace(model, layer_ropes=tuple(model.rope if one == FULL else local for one in types))
    # transformers' Gemma3Attention holds `attn_logit_softcapping` and never applies it.
    return replace(_finish(config, model, score_cap=0.0, logit_cap=0.0), attention_softcap=0.0)


GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    qk_norm=True,
    sliding_windows=_gemma3_windows,
    rope=_full_rope,
    finish=_finish_gemma3,
    defaults={**GEMMA2.defaults, "vocab_size": 262208, "max_position_embeddings": 131072},
)
