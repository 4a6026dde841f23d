"""The CPU's features are found out once, under every bound of the libraries; int8 is right on all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from penstock.common.errors import StartupError
from penstock.generation.host import cpu_features
from penstock.generation.host.cpu_features import Int8Product, describe_onednn, has_wide_set, native_bound
from penstock.generation.layers.linear import int8
from penstock.generation.layers.linear.base import WholeRows
from penstock.generation.layers.linear.int4 import Int4LinearMethod
from penstock.generation.layers.linear.int8 import Int8Linear, Int8LinearMethod, quantize_rows
from penstock.generation.rounding.rotation import halved, rotated, rotated_by_product, rotation_matrix

CODE = "from penstock.generation.host import cpu_features; print(cpu_features.describe_onednn())"
SATURATES = f"int8 {Int8Product.SATURATES.value}"
EXACT = f"int8 {Int8Product.EXACT.value}"


def flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())


@pytest.mark.parametrize(
    ("bound", "needs", "expected"),
    [
        ("AVX2", {"avx2"}, f"packs float32; {SATURATES}"),
        ("AVX2_VNNI", {"avx_vnni"}, f"packs float32; {EXACT}"),
        ("AVX512_CORE", {"avx512bw", "avx512vl", "avx512dq"}, f"packs float32, bfloat16; {SATURATES}"),
    ],
)
def test_onednns_bound_is_seen(bound: str, needs: set[str], expected: str) -> None:
    if missing := needs - flags():
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": bound}
    found = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == expected


@pytest.mark.parametrize(
    ("bound", "expected"), [("avx2", "avx2"), ("default", "avx2"), ("avx512", "avx512"), (None, None)]
)
def test_torchs_bound_holds_for_the_kernels(
    monkeypatch: pytest.MonkeyPatch, bound: str | None, expected: str | None
) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    if bound is not None:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", bound)
    assert native_bound() == expected


ZEN_4 = "avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16 avx512_vnni"


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "expected"),
    [
        ("x86_64", f"processor\t: 0\nflags\t\t: fpu {ZEN_4}\nbugs\t: x\n", True),
        ("x86_64", f"flags\t\t: {ZEN_4.replace(' avx512_bf16', '')}\n", False),
        ("x86_64", "flags\t\t: fpu avx2 fma\n", False),
        ("aarch64", "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16\n", True),
        ("aarch64", "Features\t: fp asimd asimddp\n", False),
        # Nothing is known: as if it had all.
        ("x86_64", "processor\t: 0\n", True),
    ],
)
def test_the_wider_set_is_known_by_linuxs_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, cpuinfo: str, expected: bool
) -> None:
    monkeypatch.setattr(cpu_features.platform, "machine", lambda: machine)
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert has_wide_set(tmp_path / "cpuinfo") is expected
    assert has_wide_set(tmp_path / "none")


def largest(rows: int, inputs: int) -> torch.Tensor:
    """Numbers of the largest magnitude, in runs of every pattern of signs."""
    signs = torch.randint(0, 2, (rows, inputs), generator=torch.Generator().manual_seed(rows)) * 2 - 1
    signs[0] = 1
    return signs.float()


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(7, 9), (64, 64), (130, 512)])
def test_int8_of_the_largest_numbers_is_exact(rows: int, outputs: int, inputs: int) -> None:
    weight, x = largest(outputs, inputs), largest(rows, inputs)
    # Kept as they are: blocks that are turned have other numbers.
    whole = WholeRows((weight * 127).to(torch.int8), torch.full((outputs,), 1 / 127))
    torch.testing.assert_close(Int8Linear(whole, None)(x), x @ weight.T, rtol=1e-5, atol=1e-3)


def test_two_products_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way without VNNI gives the very sums: on any CPU, of any values."""
    weight, bias, x = torch.randn(50, 96), torch.randn(50), torch.randn(6, 96)
    x[2] = 0.0
    x[4, 7] = float("nan")
    kept, weight_scale = quantize_rows(rotated(weight, 32))
    given, scale = quantize_rows(rotated_by_product(x, rotation_matrix(32, x.dtype, x.device)))
    sums = (given.double() @ kept.double().T).float()
    expected = (sums * (weight_scale / 32 * halved(32)).flatten()).mul_(scale).add_(bias)
    monkeypatch.setattr(int8, "int8_product", lambda: Int8Product.SATURATES)
    found = Int8Linear(weight, bias).as_float(x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert found[4].isnan().all()
    assert found[[0, 1, 2, 3, 5]].isfinite().all()
    assert found.is_contiguous()


@pytest.mark.parametrize("method", [Int8LinearMethod, Int4LinearMethod])
def test_no_int8_is_refused_by_its_flag(
    monkeypatch: pytest.MonkeyPatch, method: type[Int8LinearMethod | Int4LinearMethod]
) -> None:
    monkeypatch.setattr(int8, "int8_product", lambda: Int8Product.MISSING)
    with pytest.raises(StartupError, match="make kernels") as caught:
        method()
    assert caught.value.flag == "--quantization"


def test_a_product_that_is_wrong_or_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(largest: int, zero: int) -> bool:
        raise RuntimeError("could not create a primitive")

    for found in (lambda largest, zero: False, fails):
        monkeypatch.setattr(cpu_features, "_is_exact", found)
        assert cpu_features.int8_product.__wrapped__() is Int8Product.MISSING


def test_people_are_told() -> None:
    assert describe_onednn().startswith("packs float32")
