"""A number format that this CPU computes slowly is told once, in plain words, with the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from penstock.generation.devices import cpu
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.layers.linear import dense
from structlog.testing import capture_logs

RAW = "mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx512bw"


@pytest.fixture(autouse=True)
def _only_float32_is_packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (cpu, dense):
        monkeypatch.setattr(module, "packing_obstacle", lambda dtype: None if dtype is torch.float32 else RAW)
    # No kernels are built.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "system_folder", lambda: str(tmp_path))


@pytest.mark.parametrize(
    ("machine", "kernels", "dtype", "advice"),
    [
        ("x86_64", "auto", torch.bfloat16, "run `penstock build-kernels`"),
        ("x86_64", "torch", torch.bfloat16, "leave --kernels torch out"),
        ("aarch64", "auto", torch.bfloat16, "run `penstock build-kernels`"),
        ("ppc64le", "auto", torch.bfloat16, "choose --dtype float32"),
        ("x86_64", "auto", torch.float16, "choose --dtype float32"),
    ],
)
def test_the_remedy(
    machine: str, kernels: str, dtype: torch.dtype, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    device = CPUDevice()
    device.start(num_threads=1, kernels=kernels)
    with capture_logs() as logs:
        # For the model, and for a draft model.
        for _ in range(2):
            assert device.linear_method(dtype).name == "plain"
        assert device.linear_method(torch.float32).name == "packed"
    (told,) = (line for line in logs if line["log_level"] == "warning")
    assert advice in told["advice"]
    assert RAW not in str(told)
    # For who asks for more.
    assert [line["cause"] for line in logs if line["log_level"] == "debug"] == [RAW]


def test_the_kernels_formats_are_advised_where_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CPUDevice()
    device.instruction_set = "avx2"
    with capture_logs() as logs:
        device.linear_method(torch.float16)
        device.linear_method(torch.bfloat16)
    assert [line["advice"] for line in logs if line["log_level"] == "warning"] == ["choose --dtype bfloat16"]


@pytest.mark.thinned(2)
@pytest.mark.skipif("avx2" not in Path("/proc/cpuinfo").read_text(), reason="oneDNN is bound to AVX2")
@pytest.mark.parametrize(("level", "has_cause"), [("warning", False), ("debug", True)])
def test_a_process_on_such_a_cpu_shows_one_line(level: str, has_cause: bool) -> None:
    code = (
        "import torch; from penstock.common.logging import configure_logging;"
        f"configure_logging('generation', log_format='console', level='{level}');"
        "from penstock.generation.devices.cpu import CPUDevice;"
        "device = CPUDevice(); device.start(num_threads=1, kernels='torch'); device.linear_method(torch.bfloat16)"
    )
    bounds = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **bounds}, capture_output=True, text=True, check=True
    )
    lines = run.stderr.splitlines()
    assert len([line for line in lines if "slow on this CPU" in line and "--kernels" in line]) == 1
    assert ("mkldnn" in run.stderr) is has_cause
    assert len(lines) == 1 + has_cause
