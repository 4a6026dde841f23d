"""Tiny random models that have the same bits on every machine: the golden files are made with them.

No transformers here: `tools/make_goldens.py` runs beside releases years apart, and all of them, and Penstock's loader,
read these files. Weights are uniform numbers of numpy's RandomState, which has a frozen stream, and no function of libm
is involved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

VOCAB_SIZE = 320
EOS = 1
PAD = 0
# Wide enough that greedy choices are not ties: uniform in ±0.35 has a standard deviation of 0.2.
_WIDTH = 0.35

Array = npt.NDArray[np.float32]


class GoldenModel(NamedTuple):
    """Configuration of a model, and the seed of its weights."""

    seed: int
    config: Mapping[str, Any]


def _config(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    """Make config.json in the words that transformers 4.41 and 5.x both understand; nothing is left to a default."""
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000.0,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": "float32",
        "bos_token_id": 2,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        **fields,
    }


_QWEN2 = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}
_LLAMA = {"attention_bias": False, "mlp_bias": False, "rope_scaling": None, "pretraining_tp": 1}

GOLDEN_MODELS: Mapping[str, GoldenModel] = {
    "golden-qwen2": GoldenModel(
        101, _config("qwen2", "Qwen2ForCausalLM", num_hidden_layers=2, tie_word_embeddings=False, **_QWEN2)
    ),
    "golden-llama": GoldenModel(
        202, _config("llama", "LlamaForCausalLM", num_hidden_layers=3, tie_word_embeddings=True, **_LLAMA)
    ),
    # For DoLa, which has every other layer of one half as candidates.
    "golden-deep": GoldenModel(
        303, _config("llama", "LlamaForCausalLM", num_hidden_layers=8, tie_word_embeddings=False, **_LLAMA)
    ),
    "golden-deep-tied": GoldenModel(
        404, _config("qwen2", "Qwen2ForCausalLM", num_hidden_layers=8, tie_word_embeddings=True, **_QWEN2)
    ),
}


def golden_checkpoint(folder: Path, name: str, *, noise: float = 0.0) -> Path:
    """Write model `name` of GOLDEN_MODELS to `folder`, which is made, and return it. Raises KeyError.

    `noise`: so much of the weights' width is added at random: a draft model that agrees now and then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(GOLDEN_MODELS[name].config, indent=1), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(_weights(name, noise))
    return folder


def fingerprint(name: str) -> str:
    """Return the sha256 of the weights, which golden files carry."""
    return hashlib.sha256(_weights(name)).hexdigest()


def _weights(name: str, noise: float = 0.0) -> bytes:
    model = GOLDEN_MODELS[name]
    random, other = np.random.RandomState(model.seed), np.random.RandomState(model.seed + 1)
    tensors = {}
    for tensor, shape in _shapes(model.config):
        values: Array = ((random.random_sample(shape) * 2.0 - 1.0) * _WIDTH).astype(np.float32)
        if noise:
            values += ((other.random_sample(shape) * 2.0 - 1.0) * _WIDTH * noise).astype(np.float32)
        tensors[tensor] = values + np.float32(1.0) if "norm" in tensor else values
    return save(tensors, metadata={"format": "pt"})


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every tensor of the checkpoint in the order in which its numbers are drawn."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            yield f"{prefix}self_attn.{name}_proj.weight", (config[heads] * head, hidden)
            if config["model_type"] == "qwen2":
                yield f"{prefix}self_attn.{name}_proj.bias", (config[heads] * head,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
