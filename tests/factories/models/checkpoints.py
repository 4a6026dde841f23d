"""Tiny random Hugging Face checkpoints of the native families, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 320
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    # Wide enough that greedy choices are not ties.
    "initializer_range": 0.2,
}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {"qwen3": {"head_dim": 16}, "mistral": {"sliding_window": None}}


def tiny_checkpoint(
    folder: Path,
    family: str = "qwen2",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **config: Any,
) -> Path:
    """Write a random `family` model to `folder` and return it. `config` overrides fields of the family's config class.

    Biases and norm weights are random too, so that none can be forgotten unnoticed. About 0.1 s.
    """
    settings = {**_DEFAULTS, **_FAMILY_DEFAULTS.get(family, {}), **config}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_CONFIGS[family](**settings), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
            elif "norm" in name:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the checkpoint in transformers, eager attention, evaluation mode."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, attn_implementation="eager")
    return model.eval()
