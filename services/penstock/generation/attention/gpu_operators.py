"""Small operators of a GPU in Triton, each one pass over its rows; torch's operators take several.

They round where torch's operators round: a result has the bits of the reference, except for the order of a sum, and the
last bit of a root, an exponential and, except in int8 and fp8, a division. Triton comes with torch's builds for CUDA;
importing this module without it raises ImportError. Rows are contiguous, or are made so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from penstock.generation.attention.gpu_kernels import (
    gate_rows,
    multiply_row,
    multiply_whole_row,
    norm_rows,
    quantise_row,
    rescale_row,
    turn_rows,
)

if TYPE_CHECKING:
    from penstock.generation.attention.base import AttentionLayer

# Numbers of a row that one program of `silu_mul` computes.
_PIECE = 1024
# Numbers that a thread of a norm keeps, and threads of a warp.
_EACH, _WARP = 16, 32
# Outputs, and inputs at a time, of one program of a row's product: measured on an H100 (docs/guide/cuda.md).
_OUTPUTS, _INPUTS = 4, 2048
# Products and sums are rounded separately, as torch's are, when a result must have torch's bits.
_UNFUSED = {"enable_fp_fusion": False}


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start a kernel on the device of its first argument, which need not be the calling thread's current one."""
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, **options)


def rms_norm(x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
    """Return LayerKernels.rms_norm, which for a weight in float32 is `rms_norm_once`."""
    x_TI = x_TI.contiguous()
    return _normed(x_TI, x_TI, weight_I, eps, adds=False)


def add_rms_norm(hidden_TI: Tensor, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
    """Add `x` to `hidden`, which must be contiguous, in place. Return `rms_norm` of the sum."""
    assert hidden_TI.is_contiguous()
    return _normed(hidden_TI, x_TI.contiguous(), weight_I, eps, adds=True)


def _normed(hidden_TI: Tensor, x_TI: Tensor, weight_I: Tensor, eps: float, *, adds: bool) -> Tensor:
    width = weight_I.numel()
    out = torch.empty_like(hidden_TI)
    block = triton.next_power_of_2(width)
    warps = _warps(block)
    grid = (hidden_TI.numel() // width,)
    _launch(norm_rows, grid, hidden_TI, x_TI, weight_I, out, width, eps, adds, block, num_warps=warps)
    return out


def _warps(block: int) -> int:
    """Return the number of warps for a program that keeps `block` numbers."""
    return min(max(block // (_EACH * _WARP), 1), 16)


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """Return silu(first half) * second half of every row: (T, 2 F) -> (T, F)."""
    gate_up_TF = gate_up_TF.contiguous()
    width = gate_up_TF.shape[-1] // 2
    out = gate_up_TF.new_empty((*gate_up_TF.shape[:-1], width))
    grid = (out.numel() // width, triton.cdiv(width, _PIECE))
    _launch(gate_rows, grid, gate_up_TF, out, width, _PIECE)
    return out


def turn_and_write(
    qkv_TE: Tensor, cos: Tensor, sin: Tensor, layer: AttentionLayer, keys: Tensor, values: Tensor, slots_T: Tensor
) -> Tensor:
    """Split, norm and turn the fused projection (attention.base.turned), write keys and values at their slots, and
    return q_THD.

    `keys`, `values`: a layer's (blocks, block size, K, D) in the projection's dtype; cos and sin (T, 1, D / 2). Norms
    of whole rows (AttentionLayer.norm_is_whole) are not computed here.
    """
    qkv_TE = qkv_TE.contiguous()
    rows = len(qkv_TE)
    q_THD = qkv_TE.new_empty((rows, layer.num_heads, layer.head_dim))
    has_norm = layer.q_norm is not None and layer.k_norm is not None
    half = layer.head_dim // 2
    grid = (rows, layer.num_heads + 2 * layer.num_kv_heads)
    _launch(
        turn_rows,
        grid,
        qkv_TE,
        cos.contiguous(),
        sin.contiguous(),
        layer.q_norm if has_norm else qkv_TE,
        layer.k_norm if has_norm else qkv_TE,
        slots_T.contiguous(),
        q_THD,
        keys,
        values,
        layer.num_heads,
        layer.num_kv_heads,
        half,
        layer.eps,
        has_norm,
        triton.next_power_of_2(half),
        num_warps=1,
        **_UNFUSED,
    )
    return q_THD


def row_product(x_1I: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x Wᵀ + b of a single row: (1, out). The weight is contiguous."""
    return _row_product(x_1I, weight_OI, bias_O, gated=False)


def gated_row_product(x_1I: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return `silu_mul` of the product of a single row, (1, out / 2), with the product rounded in between."""
    return _row_product(x_1I, weight_OI, bias_O, gated=True)


def _row_product(x_1I: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, gated: bool) -> Tensor:
    outputs, inputs = weight_OI.shape
    outputs //= 1 + gated
    out = x_1I.new_empty((1, outputs))
    # A gated output has two rows of the weight.
    each = _OUTPUTS // (1 + gated)
    block = min(triton.next_power_of_2(inputs), _INPUTS)
    grid = (triton.cdiv(outputs, each),)
    bias, has_bias = (weight_OI, False) if bias_O is None else (bias_O, True)
    x_1I = x_1I.contiguous()
    _launch(multiply_row, grid, x_1I, weight_OI, bias, out, outputs, inputs, has_bias, gated, each, block, num_warps=4)
    return out


def quantised_rows(
    x_TI: Tensor, dtype: torch.dtype, *, padding: int, most: float, least: float = 0.0, least_rows: int = 0
) -> tuple[Tensor, Tensor]:
    """Return rows in `dtype`, int8 as int8.quantize_rows or fp8 as fp8.quantize_rows_fp8, and their scales (T, 1) in
    float32.

    A row's largest magnitude, or `least`, becomes `most`. `padding` zeros follow each row; undefined rows follow them
    all, up to `least_rows`.
    """
    rows, width = x_TI.shape
    padded = width + padding
    values = x_TI.new_empty((max(rows, least_rows), padded), dtype=dtype)
    scales = x_TI.new_empty((rows, 1), dtype=torch.float32)
    block = triton.next_power_of_2(padded)
    is_whole = dtype is torch.int8
    x_TI = x_TI.contiguous()
    _launch(
        quantise_row,
        (rows,),
        x_TI,
        values,
        scales,
        width,
        padded,
        most,
        least,
        is_whole,
        block,
        num_warps=_warps(block),
        **_UNFUSED,
    )
    return values, scales


def rescaled(sums_TP: Tensor, scale_O: Tensor, scale_T1: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sums of the first rows and outputs times both scales, plus the bias in float32, rounded to `dtype`:
    (T, O)."""
    rows, outputs = len(scale_T1), len(scale_O)
    out = sums_TP.new_empty((rows, outputs), dtype=dtype)
    bias = scale_O if bias_O is None else bias_O
    grid = (rows, triton.cdiv(outputs, _PIECE))
    padded, has_bias = sums_TP.shape[1], bias_O is not None
    _launch(rescale_row, grid, sums_TP, scale_O, scale_T1, bias, out, outputs, padded, has_bias, _PIECE, **_UNFUSED)
    return out


def whole_row_product(
    x_1I: Tensor, scale_11: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `rescaled` of the product of a single row of int8 and a contiguous weight of int8: (1, O)."""
    outputs, inputs = len(scale_O), weight_OI.shape[1]
    out = scale_O.new_empty((1, outputs), dtype=dtype)
    block = min(triton.next_power_of_2(inputs), _INPUTS)
    bias = scale_O if bias_O is None else bias_O
    grid = (triton.cdiv(outputs, _OUTPUTS),)
    has_bias = bias_O is not None
    _launch(
        multiply_whole_row,
        grid,
        x_1I,
        scale_11,
        weight_OI,
        scale_O,
        bias,
        out,
        outputs,
        inputs,
        has_bias,
        _OUTPUTS,
        block,
        num_warps=4,
        **_UNFUSED,
    )
    return out
