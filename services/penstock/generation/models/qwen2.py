"""Qwen1.5, Qwen2, Qwen2.5: bias on q, k and v only, sliding window by layer type."""

from __future__ import annotations

from penstock.generation.models.family import Family, always, windows_by_layer_type

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
