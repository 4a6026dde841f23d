"""Models in int8 and int4: near their float32 selves, the same with and without the C++ kernels, refused by flag."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.emulated_npu import EmulatedNPU
from factories.models.native import use_native
from factories.models.paged import PagedDriver, PagedSequence
from penstock.common.checkpoint import resolve_model
from penstock.common.errors import StartupError
from penstock.generation.devices.base import Device
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model

# Mean error of a logit in standard deviations of the logits, on random weights (real ones are kinder to int4).
WORST = {"int8": 0.06, "int4": 0.45}
PROMPT = list(range(5, 45))


class _NativeCPU(CPUDevice):
    """The CPU with the kernels that the test loaded."""

    def __init__(self) -> None:
        super().__init__()
        use_native()
        self.instruction_set = torch.ops.penstock.instruction_set("")


def logits(model: CausalLM, ids: list[int] | None = None) -> torch.Tensor:
    prompt = PROMPT if ids is None else ids
    sequence = PagedSequence(list(prompt))
    PagedDriver(model, num_blocks=16, block_size=8).step([(sequence, len(prompt))])
    return torch.stack(sequence.logits)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).abs().mean() / exact.std())


def _emulated_npu() -> EmulatedNPU:
    device = EmulatedNPU()
    device.start(num_threads=1)
    return device


@pytest.mark.parametrize(
    ("make", "dtypes"),
    [
        (CPUDevice, ("float32", "bfloat16")),
        (_NativeCPU, ("float32", "bfloat16")),
        (_emulated_npu, ("float16", "bfloat16")),
    ],
)
@pytest.mark.parametrize("quantization", list(WORST))
@pytest.mark.parametrize("tied", [True, False])
def test_quantised_logits_are_near_those_of_float32(
    tmp_path: Path, quantization: str, make: Callable[[], Device], dtypes: tuple[str, ...], tied: bool
) -> None:
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=tied)
    exact = logits(load_model(folder, dtype="float32", device=CPUDevice()))
    for dtype in dtypes:
        model = load_model(folder, dtype=dtype, quantization=quantization, device=make())
        found = logits(model)
        assert found.shape[1] == VOCAB_SIZE
        assert error(found, exact) <= WORST[quantization]


@pytest.mark.parametrize("quantization", list(WORST))
def test_a_quantised_model_is_smaller(quantization: str) -> None:
    folder = resolve_model(None)
    whole = load_model(folder, dtype="bfloat16", device=_NativeCPU()).num_bytes
    quantised = load_model(folder, dtype="bfloat16", quantization=quantization, device=_NativeCPU()).num_bytes
    # The embedding stays as it is: the head's quantised weight is no table.
    assert quantised < {"int8": 0.85, "int4": 0.75}[quantization] * whole


def test_the_demo_model_says_the_same_in_int8(tmp_path: Path) -> None:
    folder = resolve_model(None)
    ids = torch.randint(0, 500, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    exact = logits(load_model(folder, dtype="float32", device=CPUDevice()), ids)
    for device in (CPUDevice(), _NativeCPU()):
        found = logits(load_model(folder, dtype="float32", quantization="int8", device=device), ids)
        assert (found.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9


def test_int8_by_onednn_and_by_the_kernels_is_one() -> None:
    folder = resolve_model(None)
    found = [
        logits(load_model(folder, dtype="float32", quantization="int8", device=device))
        for device in (CPUDevice(), _NativeCPU())
    ]
    # A sum in another order may round an activation to the next of the 255 values.
    assert error(*found) < 1e-2


def test_what_cannot_be_names_its_flag(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    with pytest.raises(StartupError, match="none, int8, int8-groups, int4") as caught:
        load_model(folder, quantization="int3", device=CPUDevice())
    assert caught.value.flag == "--quantization"
    with pytest.raises(StartupError, match="fp8 is for --device cuda") as caught:
        load_model(folder, quantization="fp8", device=CPUDevice())
    assert caught.value.flag == "--quantization"
    with pytest.raises(StartupError, match="bfloat16 or float32") as caught:
        load_model(folder, dtype="float16", quantization="int8", device=CPUDevice())
    assert caught.value.flag == "--quantization"


def test_bfloat16_on_the_kernels_shares_a_tied_embedding(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tied", tie_word_embeddings=True, dtype=torch.bfloat16)
    plain, native = (load_model(folder, device=device) for device in (CPUDevice(), _NativeCPU()))
    untied = load_model(tiny_checkpoint(tmp_path / "untied", dtype=torch.bfloat16), device=_NativeCPU())
    assert untied.num_bytes - native.num_bytes == VOCAB_SIZE * native.config.hidden_size * torch.bfloat16.itemsize
    ids = torch.arange(VOCAB_SIZE)
    assert torch.equal(native.embed(ids), plain.embed(ids))
    assert error(logits(native), logits(plain)) < 0.05
