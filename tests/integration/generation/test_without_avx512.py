"""Tests that depend on what the CPU can do, once more as on a CPU without AVX-512 and VNNI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from penstock.generation.host.cpu_features import Int8Product, int8_product, packing_obstacle

TESTS = Path(__file__).resolve().parents[2]
# What Python and torch choose by the CPU.
CHOICES = ("test_cpu_features.py", "test_mapped_embeddings.py", "test_linear.py", "test_quantization.py")
# The kernels choose by their own question; their tests take AVX2 in any run, here beside torch's loops for AVX2.
KERNELS = ("test_native_linear.py",)
# These set bounds of their own, in processes of their own.
UNBOUND = "not onednns_bound"
# torch's loops and the C++ kernels; oneDNN.
BOUNDS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


# The first run of the kernels' tests compiles them.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("files", [CHOICES, pytest.param(KERNELS, marks=pytest.mark.slow)], ids=["choices", "kernels"])
def test_all_holds_without_avx512(files: tuple[str, ...]) -> None:
    if packing_obstacle(torch.bfloat16) is not None and int8_product() is not Int8Product.EXACT:
        pytest.skip("this CPU has neither packed bfloat16 nor int8 of VNNI: those tests run as they are")
    paths = [str(path) for name in files for path in TESTS.rglob(name)]
    assert len(paths) == len(files)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", UNBOUND, *paths]
    done = subprocess.run(command, cwd=TESTS.parent, env={**os.environ, **BOUNDS}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
