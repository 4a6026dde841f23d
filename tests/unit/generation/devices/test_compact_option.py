"""--compact-weights: what it asks of a device, and what it names when that cannot be."""

from __future__ import annotations

import pytest
import torch
from factories.models.native import use_native
from penstock.common.errors import StartupError
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.startup import preload

FLAGS = {"avx512": "avx512_bf16", "amx": "avx512_bf16 amx_tile", "avx2": "avx2"}


def started(wanted: str, kernels: str = "native") -> CPUDevice:
    device = CPUDevice()
    device.start(kernels=kernels, compact_weights=wanted)
    return device


@pytest.mark.parametrize("found", ["avx512", "amx", "avx2", "neon", "neon_bf16"])
def test_auto_is_on_where_it_was_measured_to_help(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr("penstock.generation.devices.cpu._native_kernels", lambda kernels: found)
    assert started("auto").compacts_weights == (found == "avx512")
    assert started("on").compacts_weights
    assert not started("off").compacts_weights


def test_auto_is_off_without_kernels() -> None:
    assert not started("auto", kernels="torch").compacts_weights


@pytest.mark.parametrize("wanted", ["on", "maybe"])
def test_what_cannot_be_names_the_flag(wanted: str) -> None:
    with pytest.raises(StartupError) as caught:
        started(wanted, kernels="torch")
    assert caught.value.flag == "--compact-weights"


def test_a_service_refuses_another_word_before_it_starts() -> None:
    with pytest.raises(StartupError, match="--compact-weights"):
        GenerationServiceConfig(model="m", compact_weights="maybe").validate()


@pytest.mark.parametrize("wanted", ["on", "off"])
def test_the_device_packs_as_it_says(wanted: str) -> None:
    use_native()
    weight = torch.randn(64, 640).bfloat16()
    linear = started(wanted).linear_method(torch.bfloat16).linear(weight, None)
    assert (linear.num_bytes < 2 * weight.numel()) == (wanted == "on")


@pytest.mark.parametrize("found", FLAGS)
def test_memory_taken_before_torch_is_there_is_what_the_device_will_use(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(preload, "cpu_flags", lambda: frozenset(FLAGS[found].split()))
    monkeypatch.setattr(preload, "torch_cpu_capability", lambda: "")
    assert preload._will_compact("auto") == (found == "avx512")
    assert preload._will_compact("on")
    assert not preload._will_compact("off")
