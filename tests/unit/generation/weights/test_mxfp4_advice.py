"""gpt-oss as it is published: what its refusal advises makes a checkpoint that starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from factories.models.checkpoints import tiny_checkpoint
from factories.models.run_kernels import cpu_device
from penstock.common.errors import StartupError
from penstock.generation.models.registry import load_model, read_model_config
from safetensors.torch import load_file, save_file


def published(folder: Path) -> Path:
    """Write a tiny gpt-oss whose experts are in MXFP4: blocks of 32 numbers of 4 bits with a scale."""
    tiny_checkpoint(folder, "gpt_oss", hidden_size=64, intermediate_size=64)
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        shape = (experts, outer, inner // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=draw)
        tensors[f"{name}_scales"] = torch.randint(120, 125, shape, dtype=torch.uint8, generator=draw)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_advice_makes_a_checkpoint_that_starts(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config  # noqa: F401 - the program names them

    folder, made = published(tmp_path / "published"), tmp_path / "made"
    with pytest.raises(StartupError) as refused:
        read_model_config(folder)
    program = re.search(r"(AutoModelForCausalLM\.from_pretrained.*\.save_pretrained\()FOLDER\)", refused.value.message)
    assert program is not None, refused.value.message
    exec(program[1].replace("MODEL", repr(str(folder))) + f"{str(made)!r})")
    model = load_model(made, dtype="float32", device=cpu_device())
    assert model.config.model_type == "gpt_oss"
    assert not model.config.checkpoint_format
