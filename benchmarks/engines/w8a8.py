"""A safetensors checkpoint with 8-bit weights in the layout of compressed-tensors ("int-quantized"), for vLLM.

A scale for every output channel, activations quantised for every token while the model runs. The head and the embedding
stay as they are, as in the checkpoints that llm-compressor writes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KEPT = ("embed_tokens", "lm_head")
EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": EIGHT_BITS | {"strategy": "channel", "dynamic": False},
            "input_activations": EIGHT_BITS | {"strategy": "token", "dynamic": True},
        }
    },
}


def convert(folder: Path, out: Path) -> None:
    """Write the folder `out`. Raises ValueError where the checkpoint is quantised already, is not of safetensors, or
    has matrices that are not known to be a linear layer or a table."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    if "quantization_config" in config:
        raise ValueError(f"{folder} is quantised already")
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ValueError(f"{folder} has no *.safetensors")
    unfinished = out.with_name(f"{out.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(folder, unfinished, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    for number, path in enumerate(shards):
        tensors = load_file(path)
        save_file(_quantized(tensors), unfinished / f"model-{number}.safetensors", metadata={"format": "pt"})
    (unfinished / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEME}))
    unfinished.rename(out)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [outputs, inputs] as int8 and scales [outputs, 1], fp32: the largest magnitude of a row becomes 127."""
    import torch

    wide = weight.to(torch.float32)
    scale = wide.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / 127
    return (wide / scale).round_().clamp_(-127, 127).to(torch.int8), scale


def _quantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = {}
    for name, values in tensors.items():
        layer, _, kind = name.rpartition(".")
        last = layer.rpartition(".")[2]
        if kind == "weight" and last in LAYERS:
            result[name], result[f"{layer}.weight_scale"] = quantize(values)
        elif values.ndim > 1 and last not in KEPT:
            # vLLM would take it for int8 without a scale.
            raise ValueError(f"{name} is neither a known linear layer nor a table")
        else:
            result[name] = values
    return result
