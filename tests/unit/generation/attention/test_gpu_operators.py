"""Triton's operators beside torch's. Where there is no GPU, Triton interprets them on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from penstock.generation.attention.base import AttentionLayer, turned
from penstock.generation.layers.layer_kernels import LayerKernels
from penstock.generation.layers.linear import fp8
from penstock.generation.layers.linear.int8_accelerator import AcceleratorInt8Linear
from torch import Tensor

REASON = "no Triton, which comes with torch for CUDA: docs/guide/cuda.md has the last run"
gpu_operators: Any = pytest.importorskip("penstock.generation.attention.gpu_operators", reason=REASON)
gpu: Any = pytest.importorskip("penstock.generation.layers.gpu", reason=REASON)

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# The interpreter cuts bfloat16 off where a GPU rounds it.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
TORCH, OURS = LayerKernels(), gpu.TritonKernels()
# A unit in the last place of numbers of these sizes, a few of them in float32.
CLOSE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=CLOSE[wanted.dtype])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 96), (3, 4096)])
def test_norms_and_gates_are_torchs(dtype: torch.dtype, rows: int, width: int) -> None:
    x, hidden, weight = (numbers(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,)))
    assert_close(OURS.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))
    assert_close(OURS.rms_norm_once(x, weight.float(), 1e-5), TORCH.rms_norm_once(x, weight.float(), 1e-5))
    ours, theirs = hidden.clone(), hidden.clone()
    assert_close(OURS.add_rms_norm(ours, x, weight, 1e-5), TORCH.add_rms_norm(theirs, x, weight, 1e-5))
    assert ours.equal(theirs)
    assert_close(OURS.silu_mul(x), TORCH.silu_mul(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["none", "narrow", "float32"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (8, 1, 80), (2, 2, 128)])
def test_heads_are_turned_and_written(dtype: torch.dtype, norm: str, heads: int, kv_heads: int, head_dim: int) -> None:
    rows, slots = 3, torch.tensor([3, 17, 30], device=DEVICE)
    qkv = numbers(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos, sin = (numbers(rows, 1, head_dim // 2, dtype=dtype) for _ in range(2))
    kind = torch.float32 if norm == "float32" else dtype
    norms = {} if norm == "none" else {name: numbers(head_dim, dtype=kind) for name in ("q_norm", "k_norm")}
    weights = AttentionLayer(heads, kv_heads, head_dim, 1.0, **norms, eps=1e-6)
    keys, values = (torch.zeros(4, 8, kv_heads, head_dim, dtype=dtype, device=DEVICE) for _ in range(2))
    q, k, v = turned(qkv, cos, sin, weights)
    assert_close(gpu_operators.turn_and_write(qkv, cos, sin, weights, keys, values, slots), q)
    assert_close(keys.view(-1, kv_heads, head_dim)[slots], k)
    assert values.view(-1, kv_heads, head_dim)[slots].equal(v)
    # Nothing else was written.
    for pool in (keys, values):
        assert pool.view(-1, kv_heads, head_dim)[[row for row in range(32) if row not in slots.tolist()]].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
# Triton compiles a one in as a number.
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 64), (66, 96), (14, 2050)])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_linear_layers_are_torchs(dtype: torch.dtype, has_bias: bool, outputs: int, inputs: int, rows: int) -> None:
    method = gpu.GPULinearMethod()
    weight = numbers(outputs, inputs, dtype=dtype) * inputs**-0.5
    bias = numbers(outputs, dtype=dtype) if has_bias else None
    x = numbers(rows, inputs, dtype=dtype)
    wanted = F.linear(x, weight, bias)
    linear = method.linear(weight, bias)
    if not rows:
        assert linear(x).shape == (0, outputs)
        return
    assert_close(linear(x), wanted)
    # A single row is rounded as rows of a batch are.
    assert_close(linear.as_float(x), linear(x).float())
    if outputs % 2 == 0:
        assert_close(method.gated(weight, bias, OURS)(x), TORCH.silu_mul(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (33, 90), (8, 2056)])
@pytest.mark.parametrize("rows", [0, 1, 3, 20])
def test_int8_has_the_cpus_bits(dtype: torch.dtype, has_bias: bool, outputs: int, inputs: int, rows: int) -> None:
    weight, bias = (torch.randn(*shape).to(dtype) for shape in ((outputs, inputs), (outputs,)))
    given = bias if has_bias else None
    # torch itself divides by a number otherwise on a GPU: the reference is on the CPU.
    theirs = AcceleratorInt8Linear(weight, given)
    ours = gpu.GPUInt8Linear(weight, given)
    for name in ("_weight_IO", "_scale", "_bias"):
        part = getattr(theirs, name)
        setattr(ours, name, None if part is None else part.to(DEVICE))
    x = torch.randn(rows, inputs).to(dtype)
    x[:1] = 0
    for one in (x, x.flip(0), x * 1e-6):
        assert ours.as_float(one.to(DEVICE)).cpu().equal(theirs.as_float(one))
        assert ours(one.to(DEVICE)).cpu().equal(theirs(one))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_numbers_has_none_after_int8(dtype: torch.dtype) -> None:
    linear = gpu.GPUInt8Linear(numbers(16, 64, dtype=dtype), None)
    for rows in (1, 3):
        x = numbers(rows, 64, dtype=dtype)
        x[-1, 5] = torch.nan
        assert linear(x)[-1].isnan().all()
        assert linear(x)[:-1].isfinite().all()


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter has no numbers of fp8")
def test_fp8_has_the_cpus_bits() -> None:
    x = torch.randn(5, 90).bfloat16()
    x[0] = 0
    bounds = {"most": fp8.MOST, "least": fp8.LEAST}
    found, scales = gpu_operators.quantised_rows(x.to(DEVICE), fp8.E4M3, padding=6, **bounds)
    values, wanted = fp8.quantize_rows_fp8(F.pad(x, (0, 6)))
    assert found.cpu().float().equal(values.float())
    assert scales.cpu().equal(wanted)
