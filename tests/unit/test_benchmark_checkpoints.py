"""The 8-bit checkpoint that the benchmark writes for vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.engines.w8a8 import convert, quantize  # noqa: E402

LAYER = "model.layers.0.mlp.up_proj"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.manual_seed(0)
    tensors = {
        f"{LAYER}.weight": torch.randn(6, 32),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(4, 32),
        "model.layers.0.self_attn.q_proj.bias": torch.randn(4),
        "model.layers.0.input_layernorm.weight": torch.ones(32),
        "model.embed_tokens.weight": torch.randn(50, 32),
    }
    save_file({name: values.to(torch.bfloat16) for name, values in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "tie_word_embeddings": True}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_row_is_within_half_a_step_of_its_scale() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 2, 16)[:, None]
    weight[3] = 0
    values, scales = quantize(weight.to(torch.bfloat16))
    assert (values.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (16, 1))
    error = (values * scales - weight.to(torch.bfloat16).to(torch.float32)).abs()
    assert bool((error <= scales * 0.501).all())
    assert values.abs().amax(dim=1).tolist() == [0 if row == 3 else 127 for row in range(16)]


def test_linear_layers_are_quantised_and_the_rest_is_as_it_was(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, out := tmp_path / "w8a8")
    before, after = load_file(checkpoint / "model.safetensors"), load_file(out / "model-0.safetensors")
    quantized = {name for name, values in after.items() if values.dtype == torch.int8}
    assert quantized == {f"{LAYER}.weight", "model.layers.0.self_attn.q_proj.weight"}
    assert set(after) - set(before) == {f"{name}_scale" for name in quantized}
    for name in set(before) - quantized:
        assert torch.equal(before[name], after[name])
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (out / "tokenizer.json").is_file()


def test_a_quantised_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, out := tmp_path / "w8a8")
    with pytest.raises(ValueError, match="quantised already"):
        convert(out, tmp_path / "again")
    assert not (tmp_path / "again").exists()
