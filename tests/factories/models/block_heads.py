"""DFlash folders with made weights in the published layout, and what such a head computes, written out in torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from factories.models.checkpoints import VOCAB_SIZE
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from penstock.generation.core.model_config import ModelConfig

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 48, 64, 4, 2, 12, 2
TAPS, MASK, BLOCK = (0, 2), 7, 5
EPS, THETA = 1e-6, 10_000.0


def dflash_config(**changes: Any) -> dict[str, Any]:
    """Return config.json as its authors' folders have it."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "num_target_layers": 5,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "dtype": "float32",
        **changes,
    }


def dflash_tensors(config: Mapping[str, Any], seed: int = 0, scale: float = 0.15) -> dict[str, Tensor]:
    """Return all tensors of the layout."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors = {
        "fc.weight": weight(hidden, len(config["dflash_config"].get("target_layer_ids", TAPS)) * hidden),
        "hidden_norm.weight": 1.0 + weight(hidden),
        "norm.weight": 1.0 + weight(hidden),
    }
    for number in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": 1.0 + weight(hidden),
            "post_attention_layernorm": 1.0 + weight(hidden),
            "self_attn.q_proj": weight(query, hidden),
            "self_attn.k_proj": weight(kv, hidden),
            "self_attn.v_proj": weight(kv, hidden),
            "self_attn.o_proj": weight(hidden, query),
            "self_attn.q_norm": 1.0 + weight(dim),
            "self_attn.k_norm": 1.0 + weight(dim),
            "mlp.gate_proj": weight(inner, hidden),
            "mlp.up_proj": weight(inner, hidden),
            "mlp.down_proj": weight(hidden, inner),
        }
        tensors |= {f"layers.{number}.{name}.weight": tensor for name, tensor in layer.items()}
    return tensors


def dflash_folder(folder: Path, tensors: Mapping[str, Tensor] | None = None, **changes: Any) -> Path:
    """Write a folder as it lies on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dflash_config(**changes)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(dflash_tensors(config) if tensors is None else tensors), folder / "model.safetensors")
    return folder


def random_dflash(random: Random, served: ModelConfig, folder: Path) -> Path:
    """Write a head of random widths for a served model."""
    kv_heads = random.choice([1, 2])
    layers, slides = random.randint(1, 3), random.random() < 0.3
    changes: dict[str, Any] = {
        "block_size": random.randint(2, 8),
        "dflash_config": {
            "mask_token_id": random.randrange(served.vocab_size),
            "target_layer_ids": sorted(random.choices(range(served.num_layers), k=random.randint(1, 4))),
            "causal": slides or random.random() < 0.3,
        },
        "hidden_size": served.hidden_size,
        "intermediate_size": random.choice([24, 40]),
        "num_attention_heads": kv_heads * random.choice([1, 2]),
        "num_key_value_heads": kv_heads,
        "head_dim": random.choice([8, 12]),
        "num_hidden_layers": layers,
        "vocab_size": served.vocab_size,
    }
    if slides:
        kinds = [random.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
        changes |= {"use_sliding_window": True, "sliding_window": random.randint(2, 9), "layer_types": kinds}
    tensors = dflash_tensors(dflash_config(**changes), random.randrange(1 << 30), random.choice([0.05, 0.2]))
    return dflash_folder(folder, tensors, **changes)


class ReferenceBlocks:
    """A DFlash head as its authors' code has it: whole sequences, no cache, every row of a block sees all."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def block(self, states_TE: Tensor, embeds_BI: Tensor) -> Tensor:
        """Return the hidden states (B, hidden) of a block after T rows; `states_TE` are the tapped states side by
        side."""
        rows_TI = self._norm("hidden_norm", states_TE @ self.tensors["fc.weight"].T)
        hidden_BI = embeds_BI
        for number in range(LAYERS):
            prefix = f"layers.{number}."
            normed_BI = self._norm(f"{prefix}input_layernorm", hidden_BI)
            query = self._heads(f"{prefix}self_attn.q", normed_BI, len(rows_TI))
            both = torch.cat([rows_TI, normed_BI])
            key = self._heads(f"{prefix}self_attn.k", both, 0)
            value = (both @ self._weight(f"{prefix}self_attn.v_proj").T).view(len(both), -1, HEAD_DIM).transpose(0, 1)
            key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (key, value))
            attended = F.scaled_dot_product_attention(query, key, value).transpose(0, 1).flatten(1)
            hidden_BI = hidden_BI + attended @ self._weight(f"{prefix}self_attn.o_proj").T
            inner = self._norm(f"{prefix}post_attention_layernorm", hidden_BI)
            gate, up = (inner @ self._weight(f"{prefix}mlp.{name}_proj").T for name in ("gate", "up"))
            hidden_BI = hidden_BI + (F.silu(gate) * up) @ self._weight(f"{prefix}mlp.down_proj").T
        return self._norm("norm", hidden_BI)

    def _heads(self, name: str, rows_TI: Tensor, first: int) -> Tensor:
        """Return queries or keys (heads, T, dim), normed and turned by positions from `first` on."""
        heads = (rows_TI @ self._weight(f"{name}_proj").T).view(len(rows_TI), -1, HEAD_DIM).transpose(0, 1)
        return _turned(self._norm(f"{name}_norm", heads), first)

    def _weight(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weight(name), EPS)


def _turned(x_HTD: Tensor, first: int) -> Tensor:
    half = HEAD_DIM // 2
    frequencies = THETA ** -(torch.arange(half) * 2 / HEAD_DIM)
    angles = (first + torch.arange(x_HTD.shape[1]))[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    one, other = x_HTD[..., :half], x_HTD[..., half:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)
