"""Tiny random Hugging Face checkpoints of the native families, written by transformers itself."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from penstock.generation.core.delta_heads import DELTA_TYPES
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiniCPM3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SarvamMLAConfig,
    SmolLM3Config,
    YoutuConfig,
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
_CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "phi3": Phi3Config,
    "granite": GraniteConfig,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "smollm3": SmolLM3Config,
    "glm": GlmConfig,
    "glm4": Glm4Config,
    "cohere": CohereConfig,
    "cohere2": Cohere2Config,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
    "gemma4_text": Gemma4TextConfig,
    "gemma4_unified_text": Gemma4UnifiedTextConfig,
    "mixtral": MixtralConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "gpt_oss": GptOssConfig,
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
    "deepseek_v32": DeepseekV32Config,
    "glm_moe_dsa": GlmMoeDsaConfig,
    "sarvam_mla": SarvamMLAConfig,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "youtu": YoutuConfig,
    "minicpm3": MiniCPM3Config,
    "qwen3_5_text": Qwen3_5TextConfig,
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig,
    "qwen3_next": Qwen3NextConfig,
}
# Types that transformers has under another name.
_OTHER_NAMES = {"kimi_k2": "deepseek_v3"}
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
_GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}
# The last two layers may share keys and values with those before.
_SLIDES, _READS_ALL = "sliding_attention", "full_attention"
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": [_SLIDES, _READS_ALL, _SLIDES, _SLIDES, _READS_ALL],
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 4.0,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
_DEEPSEEK: dict[str, Any] = {
    **_LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
# Shorter than the prompts of the tests. With fewer heads of the indexer many positions would have no product above 0:
# transformers chooses among such equals by chance.
_SPARSE: dict[str, Any] = {**_DEEPSEEK, "index_topk": 12, "index_head_dim": 12, "index_n_heads": 24}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "phi3": {"partial_rotary_factor": 0.5, "head_dim": 12},
    "granite": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "olmo3": {"sliding_window": 9, "num_hidden_layers": 4},
    "smollm3": {"no_rope_layer_interval": 2},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "cohere2": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 6.0, "final_logit_softcapping": 4.0},
    "gemma3_text": _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": _GEMMA4
    | {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 2},
    "gemma4_unified_text": _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    "qwen3_moe": _EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "sarvam_mla": _DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {**_DEEPSEEK, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["sparse", "dense"]},
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": {**_SPARSE, "n_group": 1, "topk_group": 1, "indexer_types": ["full", "shared"]},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3_next": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
}


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

    Biases and norm weights are random too, so that none can be forgotten unnoticed.
    """
    known = _OTHER_NAMES.get(family, family)
    settings = {**_DEFAULTS, **_FAMILY_DEFAULTS.get(known, {}), **config}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files(known, seed, dtype, max_shard_size, _Settings(settings)).items():
        (folder / name).write_bytes(content)
    if known != family:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(values | {"model_type": family}), encoding="utf-8")
    return folder


class _Settings(dict[str, Any]):
    """Fields of a configuration, which are its key: lists and dicts among them have no hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


# Files take 0.3 MB and more: of the last few models that a worker's tests made.
@lru_cache(maxsize=48)
def _files(family: str, seed: int, dtype: torch.dtype, max_shard_size: str, settings: _Settings) -> dict[str, bytes]:
    """Make a model's files. Many tests ask for the same ones, which take transformers thirty times as long."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # A configuration rewrites its own dicts, which would be the key's.
        config = _CONFIGS[family](**deepcopy(dict(settings)))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        buffers = [one for one in model.named_buffers() if one[0].endswith("e_score_correction_bias")]
        for name, scalar in model.named_buffers():
            if name.endswith("layer_scalar"):
                torch.nn.init.uniform_(scalar, 0.5, 1.5)
        for name, parameter in (*model.named_parameters(), *buffers):
            if name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(parameter, std=0.2)
            elif "norm" in name:
                has_offset = family in ("gemma2", "gemma3_text") or (
                    family in DELTA_TYPES and "linear_attn" not in name
                )
                torch.nn.init.normal_(parameter, mean=0.0 if has_offset else 1.0, std=0.2)
            elif name.endswith(("mlp.gate.weight", "router.weight")):
                # Wide enough that the choice of experts is no tie.
                torch.nn.init.normal_(parameter, std=0.5)
    with TemporaryDirectory() as folder:
        model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the checkpoint in transformers, eager attention, evaluation mode."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, attn_implementation="eager")
    return model.eval()
