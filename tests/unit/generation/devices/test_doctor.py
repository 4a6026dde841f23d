"""`penstock doctor` finds a device right that computes what the CPU does, and names the operation that does not."""

from __future__ import annotations

import pytest
import torch
from factories.models import emulated_npu
from factories.models.emulated_cuda import EmulatedCUDA
from factories.models.emulated_npu import EmulatedNPU
from penstock.cli import app
from penstock.generation.attention import npu_operators
from penstock.generation.devices import device_registry
from penstock.generation.devices.base import Device
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.devices.doctor import examine
from typer.testing import CliRunner

# Dtypes of x in products of whole numbers.
WHOLE_NUMBERS: dict[type[Device], set[torch.dtype]] = {
    CPUDevice: {torch.bfloat16, torch.float32},
    EmulatedNPU: {torch.bfloat16, torch.float16},
    EmulatedCUDA: {torch.bfloat16, torch.float16, torch.float32},
}


def started(device: Device) -> Device:
    device.start(num_threads=1, kernels="torch")
    return device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [CPUDevice, EmulatedNPU, EmulatedCUDA])
def test_a_device_that_is_right(kind: type[Device], dtype: torch.dtype) -> None:
    findings = list(examine(started(kind()), dtype))
    forms = [finding.name for finding in findings if finding.name.endswith((", int8", ", int4"))]
    assert len(findings) == 13 + len(forms)
    names = [f"linear layer{rows}, {form}" for rows in ("", ", one row") for form in ("int8", "int4")]
    assert forms == (names if dtype in WHOLE_NUMBERS[kind] else [])
    assert [finding.name for finding in findings if not finding.is_right] == []


def test_a_band_that_is_one_key_wider_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device = started(EmulatedNPU())
    operator = emulated_npu.IMPLEMENTATIONS["npu_fused_infer_attention_score"]

    class Wider:
        """torch.ops.npu with a band that sees one position more."""

        def __getattr__(self, name: str) -> object:
            return getattr(torch.ops.npu, name)

        def npu_fused_infer_attention_score(self, *tensors: object, **options: object) -> object:
            return operator(*tensors, **{**options, "pre_tokens": options["pre_tokens"] + 1})  # type: ignore[operator]

    class Ops:
        npu = Wider()

    class Torch:
        ops = Ops()

        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

    monkeypatch.setattr(npu_operators, "torch", Torch())
    wrong = [finding.name for finding in examine(device) if not finding.is_right]
    assert "attention, window 1" in wrong
    assert "attention" not in wrong


def test_an_operator_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no such operator\nand more")

    monkeypatch.setattr(npu_operators, "swiglu", refuse)
    wrong = [finding for finding in examine(started(EmulatedNPU())) if not finding.is_right]
    assert [finding.name for finding in wrong] == ["gated layer", "gated layer, one row", "silu_mul"]
    assert {finding.error for finding in wrong} == {"RuntimeError: no such operator"}


def test_the_command_prints_a_line_for_each_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_registry, "NPUDevice", lambda number: EmulatedNPU(number))
    found = CliRunner().invoke(app.app, ["doctor", "--device", "npu:0"])
    assert found.exit_code == 0, found.output
    assert "npu:0 (emulated)" in found.output
    assert found.output.count("\nok ") == 17
