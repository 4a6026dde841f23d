"""Random LoRA adapters in PEFT's folders, and models with such an adapter merged into their weights by plain maths."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from factories.models.checkpoints import reference_model
from penstock.generation.adapters.adapter_limits import AdapterLimits
from penstock.generation.adapters.peft_folder import PeftFolder
from penstock.generation.core.adapter import Adapter
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import read_model_config
from penstock.generation.weights.tensor_names import EMBEDDING, LM_HEAD, tensor_shapes
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Large enough that greedy ids change.
STRENGTH = 0.5


def lora_folder(
    folder: Path,
    checkpoint: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: tuple[str, ...] = LAYER_TARGETS,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    strength: float = STRENGTH,
    ranks: Mapping[str, int] | None = None,
    saved: tuple[str, ...] = (),
    **config: Any,
) -> Path:
    """Write a random adapter of the model in `checkpoint` to `folder` and return it.

    `ranks`: rank_pattern by a module's last name; `saved`: modules_to_save, lm_head or embed_tokens; `config`: further
    fields of adapter_config.json.
    """
    draw = torch.Generator().manual_seed(seed)
    ranks = ranks or {}
    tensors: dict[str, Tensor] = {}
    shapes = tensor_shapes(read_model_config(checkpoint))
    shapes.setdefault(LM_HEAD, shapes[EMBEDDING])
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        short = module.rpartition(".")[2]
        if short in saved:
            tensors[f"base_model.model.{name}"] = (torch.randn(shape, generator=draw) / math.sqrt(shape[1])).to(dtype)
        if short not in targets or len(shape) != 2:
            continue
        r = ranks.get(short, rank)
        outputs, inputs = shape
        kind, end = ("lora_", ".weight")
        if name == EMBEDDING:
            # transposed: ids are its inputs.
            outputs, inputs, kind, end = inputs, outputs, "lora_embedding_", ""
        a = torch.randn(r, inputs, generator=draw) / math.sqrt(1 if name == EMBEDDING else inputs)
        b = torch.randn(outputs, r, generator=draw) * strength / math.sqrt(r) * r / alpha
        tensors[f"base_model.model.{module}.{kind}A{end}"] = a.to(dtype)
        tensors[f"base_model.model.{module}.{kind}B{end}"] = b.to(dtype).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    values: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(checkpoint),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "inference_mode": True,
        "lora_dropout": 0.1,
        "rank_pattern": dict(ranks),
        "modules_to_save": list(saved) or None,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def merged_weights(folder: Path) -> dict[str, Tensor]:
    """Return what an adapter adds to each weight, by the weight's name, in float32.

    Patterns of the folder must be last names of modules.
    """
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "adapter_model.safetensors")
    added: dict[str, Tensor] = {}
    for name, a in tensors.items():
        if "lora_A" not in name and "lora_embedding_A" not in name:
            continue
        b = tensors[name.replace("_A", "_B")]
        module = name.removeprefix("base_model.model.").partition(".lora_")[0]
        alpha = config.get("alpha_pattern", {}).get(module.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        product = scale * (b.double() @ a.double())
        added[f"{module}.weight"] = (product.T if "embedding" in name else product).float()
    return added


def merged_checkpoint(target: Path, checkpoint: Path, folder: Path) -> Path:
    """Write the model of `checkpoint` with the adapter in its weights to `target` and return it; embeddings untied."""
    model = reference_model(checkpoint)
    added = merged_weights(folder)
    if model.config.tie_word_embeddings:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, change in added.items():
            model.get_parameter(name).add_(change)
        for name, tensor in load_file(folder / "adapter_model.safetensors").items():
            if "lora_" not in name:
                model.get_parameter(name.removeprefix("base_model.model.")).copy_(tensor)
    model.save_pretrained(target)
    return target


def read_adapter(folder: Path, model: CausalLM, *, name: str = "adapter", generation: str = "") -> Adapter:
    """Read an adapter for `model`, without a store."""
    files = PeftFolder(folder, None, model, AdapterLimits(max_adapter_rank=1024))
    weights = files.read()
    return Adapter(
        name, folder, generation or name, files.rank, files.targets, weights.num_bytes, weights, files.digest()
    )
