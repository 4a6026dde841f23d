"""gpt-oss as it is published: experts in MXFP4, which mean what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from factories.models.checkpoints import tiny_checkpoint
from factories.models.native import use_native
from factories.models.paged import PagedDriver, PagedSequence
from penstock.common.errors import StartupError
from penstock.generation.core.model_config import ConfigReader
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.registry import load_model
from penstock.generation.weights.quantised.mxfp4 import Mxfp4
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The published folder, and one that transformers dequantised."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    home = tmp_path_factory.mktemp("gpt-oss")
    folder = published(home / "published")
    options = Mxfp4Config(dequantize=True)
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=options).save_pretrained(home / "made")
    return folder, home / "made"


def logits(folder: Path, device: CPUDevice, **options: Any) -> tuple[torch.Tensor, tuple[tuple[str, int], ...]]:
    """Of a prompt in float32, with the forms of the weights."""
    loaded = load_model(folder, device=device, dtype="float32", **options)
    sequence = PagedSequence(list(range(5, 35)))
    PagedDriver(loaded, num_blocks=8, block_size=8).step([(sequence, 30)])
    return torch.stack(sequence.logits), loaded.config.weight_forms


def test_gpt_oss_means_what_transformers_makes_of_it(folders: tuple[Path, Path]) -> None:
    published_folder, made = folders
    exact, forms = logits(made, CPUDevice())
    assert forms == ()
    for quantization in ("auto", "none"):
        found, forms = logits(published_folder, CPUDevice(), quantization=quantization)
        assert {form for form, _ in forms} == {"float32"}
        assert float((found - exact).abs().max()) < 1e-4 * float(exact.abs().max())


@pytest.mark.kernels
def test_the_kernels_keep_its_experts_at_four_bits(folders: tuple[Path, Path]) -> None:
    use_native()
    published_folder, made = folders
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    exact, _ = logits(made, CPUDevice())
    found, forms = logits(published_folder, device)
    assert {form for form, _ in forms} == {"mxfp4"}
    assert float((found - exact).abs().mean() / exact.std()) < 0.04


def test_experts_of_no_whole_blocks_are_refused() -> None:
    form = Mxfp4(ConfigReader({}, "config.json"))
    with pytest.raises(StartupError, match="has no whole blocks of 48 inputs"):
        form.stacked_parts("experts.down_proj", (4, 48, 64), NoFiles())


class NoFiles:
    """A base.StoredFiles of an empty folder."""

    metadata: ClassVar[dict[str, str]] = {}

    def __contains__(self, tensor: str) -> bool:
        return False

    def shape(self, tensor: str) -> tuple[int, ...]:
        raise KeyError(tensor)

    def stored_as(self, tensor: str) -> str:
        raise KeyError(tensor)
