"""Random LoRA adapters of a checkpoint's shape, as PEFT saves them, made on first use beside the checkpoints."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Small beside the layer's own weights.
SCALE = 0.01


def adapter_folders(checkpoint: Path, count: int, ranks: Sequence[int], cache: Path) -> list[Path]:
    """Return `count` folders of adapters of all seven linear layers a decoder layer has, their ranks in turn."""
    return [
        _folder(checkpoint, cache / f"{checkpoint.name}.lora-{number}-r{rank}", rank, number)
        for number, rank in zip(range(count), itertools.cycle(ranks), strict=False)
    ]


def _folder(checkpoint: Path, folder: Path, rank: int, seed: int) -> Path:
    if (folder / "adapter_config.json").is_file():
        return folder
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for name, (outputs, inputs) in _linear_shapes(checkpoint).items():
        a = torch.randn(rank, inputs, generator=draw) / inputs**0.5
        b = torch.randn(outputs, rank, generator=draw) * SCALE
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(torch.bfloat16)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(torch.bfloat16)
    # Filled under another name: one that was cut short is not taken for whole.
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    save_file(tensors, unfinished / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": checkpoint.name,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(TARGETS),
        "bias": "none",
        "inference_mode": True,
    }
    (unfinished / "adapter_config.json").write_text(json.dumps(config) + "\n")
    unfinished.rename(folder)
    return folder


def _linear_shapes(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """{module: (outputs, inputs)} of the layers that TARGETS names, from the headers of the weights' files."""
    from safetensors import safe_open

    shapes = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                module = name.removesuffix(".weight")
                if module != name and module.rpartition(".")[2] in TARGETS:
                    outputs, inputs = file.get_slice(name).get_shape()
                    shapes[module] = (outputs, inputs)
    return shapes
