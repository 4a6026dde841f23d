"""Quantised products of a GPU: the CPU's numbers, and shapes and layouts that its operators take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from factories.models import emulated_cuda
from factories.models.emulated_cuda import EmulatedCUDA
from penstock.common.errors import StartupError
from penstock.generation.devices.cpu import cpu_method
from penstock.generation.devices.cuda import CUDADevice
from penstock.generation.layers.linear.base import INT4, INT8, Linear, NotFinite, WholeRows
from penstock.generation.layers.linear.fp8 import Fp8LinearMethod
from penstock.generation.layers.linear.int4_cuda import CudaInt4Method
from penstock.generation.layers.linear.int4_search import search_rows
from penstock.generation.layers.linear.int8 import quantize_rows
from penstock.generation.layers.linear.int8_accelerator import AcceleratorInt8Method
from penstock.generation.rounding.rotation import (
    halved,
    rotated,
    rotated_by_product,
    rotation_block,
    rotation_matrix,
)

# Whole tiles, and what is to be filled up: inputs, outputs, or both.
SHAPES = [(32, 64), (24, 128), (40, 160), (21, 37), (9, 64)]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two products that the CPU has, too, ask for what a GPU asks for."""
    emulated_cuda.install()
    monkeypatch.setattr(torch, "_int_mm", emulated_cuda.int_mm)
    monkeypatch.setattr(torch, "_scaled_mm", emulated_cuda.scaled_mm)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def int8_reference(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    block = rotation_block(weight.shape[1])
    values, scale = quantize_rows(rotated(weight, block))
    rows, row_scale = quantize_rows(rotated_by_product(x.float(), rotation_matrix(block, torch.float32, x.device)))
    return (rows.double() @ values.double().t()).float() * (scale / block * halved(block)).t() * row_scale


def int4_reference(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    whole = search_rows(weight).whole()
    assert whole.offset is not None
    # Scales, and what 8 means, in bfloat16.
    scale = whole.scale.bfloat16().float()
    middle = ((whole.offset / whole.scale + 8) * scale).bfloat16().float()
    scale, middle = (one.repeat_interleave(32, dim=1)[:, : weight.shape[1]] for one in (scale, middle))
    dense = ((whole.values.float() - 8) * scale + middle).bfloat16()
    return x.bfloat16().float() @ dense.float().t()


def fp8_reference(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    def rounded(rows: torch.Tensor) -> torch.Tensor:
        scale = rows.abs().amax(-1, keepdim=True) / 448
        return (rows / scale).to(torch.float8_e4m3fn).float() * scale

    return rounded(x) @ rounded(weight).t()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize(
    ("quantization", "reference", "tolerance"),
    [("int8", int8_reference, 1e-6), ("int4", int4_reference, 1e-2), ("fp8", fp8_reference, 1e-2)],
)
def test_products_are_those_of_the_format(
    quantization: str,
    reference: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    tolerance: float,
    outputs: int,
    inputs: int,
) -> None:
    weight, bias = numbers(outputs, inputs), numbers(outputs, seed=2)
    method = EmulatedCUDA().linear_method(torch.float32, quantization)
    plain, biased = method.linear(weight.clone(), None), method.linear(weight.clone(), bias)
    for rows in (1, 3, 16, 17, 40):
        x = numbers(rows, inputs, seed=1)
        expected = reference(weight, x)
        torch.testing.assert_close(plain.as_float(x), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(biased(x), expected + bias, rtol=tolerance, atol=tolerance)


def test_int8_is_what_the_cpu_computes() -> None:
    weight, x = numbers(40, 96), numbers(5, 96, seed=1).bfloat16()
    there = EmulatedCUDA().linear_method(torch.bfloat16, "int8").linear(weight.clone(), None)
    here = cpu_method(torch.bfloat16, "int8", native=False).linear(weight, None)
    torch.testing.assert_close(there.as_float(x), here.as_float(x), rtol=1e-6, atol=1e-6)
    assert there(x).dtype is torch.bfloat16


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_row_does_not_depend_on_others(quantization: str) -> None:
    linear = EmulatedCUDA().linear_method(torch.float32, quantization).linear(numbers(24, 64), None)
    x = numbers(20, 64, seed=1)
    x[7] = torch.nan
    alone = linear(x[3:4])
    assert torch.equal(linear(x)[3:4], alone)
    assert linear(x[:0]).shape == (0, 24)


def test_whole_numbers_are_kept() -> None:
    values = torch.arange(-64, 64).view(2, 64).to(torch.int8)
    kept: Linear = AcceleratorInt8Method()._whole(WholeRows(values, torch.tensor([0.5, 0.25])), None)
    assert kept.quantised_as == INT8
    assert kept.mean_scale == 0.375
    x = torch.eye(64) * 127
    torch.testing.assert_close(kept(x), (values.t() * torch.tensor([0.5, 0.25])).float() * 127)
    fours = WholeRows(torch.arange(64).remainder(16).view(1, 64).to(torch.uint8), torch.full((1, 2), 0.5))
    found = CudaInt4Method()._whole(fours, None)
    assert found.quantised_as == INT4
    torch.testing.assert_close(found(torch.eye(64)), (fours.values.float() - 8).t() * 0.5)
    uneven = CudaInt4Method()._whole(fours.asymmetric(), None)
    assert uneven.quantised_as == "int4-asymmetric"
    torch.testing.assert_close(uneven(torch.eye(64)), (fours.values.float() - 8).t() * 0.5)


def test_the_head_is_more_exact_than_the_layers() -> None:
    weight = numbers(32, 64)
    assert CudaInt4Method().head(weight.clone()).quantised_as == INT8
    x = numbers(3, 64, seed=1)
    assert torch.equal(Fp8LinearMethod().head(weight)(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_bytes_are_those_of_the_format(quantization: str) -> None:
    linear = EmulatedCUDA().linear_method(torch.float32, quantization).linear(numbers(64, 128), None)
    # int4: bfloat16 scale and zero for each group of 32.
    assert (
        linear.num_bytes
        == {"int8": 64 * 128 + 64 * 4, "int4": 64 * 128 // 2 + 64 * 4 * 4, "fp8": 64 * 128 + 64 * 4}[quantization]
    )


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_weight_that_is_not_finite_is_refused(quantization: str) -> None:
    weight = numbers(24, 64)
    weight[5, 3] = torch.nan
    with pytest.raises(NotFinite):
        EmulatedCUDA().linear_method(torch.float32, quantization).linear(weight, None)


@pytest.mark.parametrize(("quantization", "least"), [("int4", "8.0"), ("fp8", "8.9")])
def test_an_old_gpu_is_refused_by_the_flag(quantization: str, least: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def get_device_capability(self, number: int) -> tuple[int, int]:
            return 7, 5

    monkeypatch.setattr(CUDADevice, "_runtime", lambda self: Runtime())
    with pytest.raises(
        StartupError, match=f"--quantization {quantization} needs .* capability {least}, .* has 7.5"
    ) as caught:
        CUDADevice().linear_method(torch.bfloat16, quantization)
    assert caught.value.flag == "--quantization"
    assert CUDADevice().linear_method(torch.bfloat16, "int8").name == "int8"


def test_fp8_is_refused_elsewhere() -> None:
    with pytest.raises(StartupError, match="--quantization fp8 is for --device cuda"):
        cpu_method(torch.bfloat16, "fp8", native=False)
