"""Qwen3 (dense): RMSNorm on each head of q and k, explicit head_dim."""

from __future__ import annotations

from penstock.generation.models.family import Family, from_field, windows_by_layer_type

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
