"""Llama 2, 3, 3.1, 3.2 and models that share their architecture."""

from __future__ import annotations

from penstock.generation.models.family import Family, from_field

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
