"""Checkpoints that carry a layer for drafts, in the published layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from factories.models.checkpoints import tiny_checkpoint
from penstock.generation.core.delta_heads import DELTA_TYPES
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
# Names of the parts beside a decoder layer, by those of `Carried.own`: DeepSeek's layer 2, and Qwen's.
_DEEPSEEK = {"joint": "eh_proj", "embed_norm": "enorm", "state_norm": "hnorm", "norm": "shared_head.norm"}
_QWEN = {"joint": "fc", "embed_norm": "pre_fc_norm_embedding", "state_norm": "pre_fc_norm_hidden", "norm": "norm"}


class Carried:
    """A checkpoint with a layer for drafts, and one of a model of that layer alone."""

    def __init__(self, base: Path, family: str, *, shares: bool = True, seed: int = 3, **config: Any) -> None:
        """Write them. `shares`: embedding and head of the layer are the model's, as they always are in Qwen's layout.
        `config`: of both."""
        is_qwen = family in DELTA_TYPES
        self.folder = tiny_checkpoint(base / "model", family, seed=seed, **config)
        self.alone = tiny_checkpoint(
            base / "layer", family, seed=seed + 6, **{**config, "num_hidden_layers": 1, **_last_kind(family)}
        )
        tensors, own = load_file(self.folder / WEIGHTS), load_file(self.alone / WEIGHTS)
        generator = torch.Generator().manual_seed(seed + 1)
        hidden = tensors["model.norm.weight"].shape[0]
        first, last = "model.layers.0.", sum(name.endswith(".input_layernorm.weight") for name in tensors)
        layer, rest = ("mtp.layers.0.", "mtp.") if is_qwen else (f"model.layers.{last}.",) * 2
        tensors |= {name.replace(first, layer): tensor for name, tensor in own.items() if name.startswith(first)}
        mean = 0.0 if is_qwen else 1.0
        self.own: dict[str, Tensor] = {
            "joint": torch.randn(hidden, 2 * hidden, generator=generator) * 0.1,
            "embed_norm": mean + 0.2 * torch.randn(hidden, generator=generator),
            "state_norm": mean + 0.2 * torch.randn(hidden, generator=generator),
            "norm": own["model.norm.weight"],
        }
        names = _QWEN if is_qwen else _DEEPSEEK
        tensors |= {f"{rest}{names[name]}.weight": tensor for name, tensor in self.own.items()}
        source = tensors if shares else own
        table = source["model.embed_tokens.weight"]
        self.table_VI, self.head_VI = table, source.get("lm_head.weight", table)
        if not is_qwen:
            tensors |= {
                f"{rest}shared_head.head.weight": self.head_VI.clone(),
                f"{rest}embed_tokens.weight": self.table_VI.clone(),
            }
        self.offset = 1.0 if is_qwen else 0.0
        save_file(tensors, self.folder / WEIGHTS, metadata={"format": "pt"})


def _last_kind(family: str) -> dict[str, Any]:
    """Return what makes the one layer of a model the kind that such a layer is."""
    if family in DELTA_TYPES:
        return {"layer_types": ["full_attention"], **({"mlp_only_layers": []} if family == "qwen3_next" else {})}
    return {"mlp_layer_types": ["sparse"]} if family == "glm4_moe_lite" else {"first_k_dense_replace": 0}
