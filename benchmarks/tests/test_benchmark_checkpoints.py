"""The 8-bit checkpoint that the benchmark writes for vLLM, and where its adapter takes it from."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.adapters import adapter_folders
from benchmarks.engines import w8a8
from benchmarks.engines.base import Settings, Unsupported
from benchmarks.engines.vllm import Vllm
from benchmarks.engines.w8a8 import convert, quantize

LAYERS = {
    f"model.layers.0.{name}.weight"
    for name in (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two shards, their index, and a head of its own."""
    folder = tmp_path / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(4 + index, 32, generator=generator) for index, name in enumerate(sorted(LAYERS))}
    others = {
        "model.layers.0.self_attn.q_proj.bias": torch.randn(4, generator=generator),
        "model.layers.0.input_layernorm.weight": torch.ones(32),
        "model.embed_tokens.weight": torch.randn(50, 32, generator=generator),
        "lm_head.weight": torch.randn(50, 32, generator=generator),
    }
    for number, shard in enumerate((tensors, others)):
        values = {name: value.to(torch.bfloat16) for name, value in shard.items()}
        save_file(values, folder / f"model-0000{number + 1}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "tie_word_embeddings": False}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: values for path in folder.glob("*.safetensors") for name, values in load_file(path).items()}


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
    before, after = weights(checkpoint), weights(out)
    assert set(after) - set(before) == {f"{name}_scale" for name in LAYERS}
    for name, values in before.items():
        if name in LAYERS:
            scale = after[f"{name}_scale"]
            assert (after[name].dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (len(values), 1))
            assert bool(((after[name] * scale - values).abs() <= scale * 0.501).all())
        else:
            assert torch.equal(values, after[name])
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "tokenizer.json", "model-0.safetensors", "model-1.safetensors")
    }


def test_the_config_says_what_vllm_asks_for(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, out := tmp_path / "w8a8")
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }
    assert config["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def test_what_cannot_be_written_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, out := tmp_path / "w8a8")
    with pytest.raises(ValueError, match="quantised already"):
        convert(out, tmp_path / "again")
    save_file({"model.layers.0.mlp.fc1.weight": torch.ones(4, 4)}, checkpoint / "model-3.safetensors")
    with pytest.raises(ValueError, match=r"mlp\.fc1\.weight is neither"):
        convert(checkpoint, tmp_path / "again")
    for path in checkpoint.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        convert(checkpoint, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_what_was_cut_short_is_made_anew(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "w8a8.part").mkdir()
    (tmp_path / "w8a8.part" / "model-7.safetensors").write_text("half")
    convert(checkpoint, out := tmp_path / "w8a8")
    assert not (out / "model-7.safetensors").exists()
    assert not (tmp_path / "w8a8.part").exists()


def test_the_adapter_makes_the_checkpoint_once(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    made: list[Path] = []
    monkeypatch.setattr(w8a8, "convert", lambda folder, out: (made.append(out), convert(folder, out)))
    settings = Settings(str(checkpoint), "int8", 1, 64, 64, str(tmp_path))
    for _ in range(2):
        monkeypatch.setattr(os, "environ", dict(os.environ))
        Vllm(settings).prepare()
    assert made == [tmp_path / "model.w8a8"]
    with pytest.raises(Unsupported, match="no int4 weights"):
        Vllm(Settings(str(checkpoint), "int4", 1, 64, 64, str(tmp_path))).prepare()


def test_adapters_change_the_seven_linear_layers_of_their_ranks(checkpoint: Path, tmp_path: Path) -> None:
    folders = adapter_folders(checkpoint, 3, (8, 16), tmp_path)
    assert [json.loads((folder / "adapter_config.json").read_text())["r"] for folder in folders] == [8, 16, 8]
    tensors = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    layers = {name.removesuffix(".weight") for name in LAYERS}
    assert set(tensors[0]) == {f"base_model.model.{name}.lora_{side}.weight" for name in layers for side in "AB"}
    weights_before = weights(checkpoint)
    for name in layers:
        outputs, inputs = weights_before[f"{name}.weight"].shape
        assert tensors[1][f"base_model.model.{name}.lora_A.weight"].shape == (16, inputs)
        assert tensors[1][f"base_model.model.{name}.lora_B.weight"].shape == (outputs, 16)
    # Each its own; made once.
    assert not torch.equal(*(next(iter(tensors[number].values())) for number in (0, 2)))
    assert adapter_folders(checkpoint, 3, (8, 16), tmp_path) == folders
