"""Layers of a GPU: torch's products, and Triton's operators. The latter compute single rows, since they read a weight
faster than cuBLAS does, and the steps around the products of int8 and fp8 (docs/guide/cuda.md). Without Triton this
module cannot be imported."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.attention import gpu_operators
from penstock.generation.core.model_config import Activation
from penstock.generation.layers.layer_kernels import LayerKernels
from penstock.generation.layers.linear import fp8
from penstock.generation.layers.linear.base import Gated, Linear, Weight, WholeRows, dense
from penstock.generation.layers.linear.dense import PlainLinear, PlainLinearMethod
from penstock.generation.layers.linear.int8 import MOST
from penstock.generation.layers.linear.int8_accelerator import (
    LEAST_ROWS,
    AcceleratorInt8Linear,
    AcceleratorInt8Method,
)


class GPULinear(PlainLinear):
    """An unchanged weight."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        """Take over the weight."""
        super().__init__(weight_OI.contiguous(), None if bias_O is None else bias_O.contiguous())

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        if x_TI.shape[0] != 1:
            return super().__call__(x_TI)
        return gpu_operators.row_product(x_TI, self._weight, self._bias)

    def gated(self, x_1I: Tensor) -> Tensor:
        """Return silu(first half of the outputs) * second half for a single row."""
        return gpu_operators.gated_row_product(x_1I, self._weight, self._bias)


class GatedGPULinear(Gated):
    """silu(first half of a linear layer's outputs) * second half; one operator for a single row."""

    _linear: GPULinear

    def __init__(self, linear: GPULinear, kernels: LayerKernels) -> None:
        """Take the layer with both halves."""
        super().__init__(linear, kernels.silu_mul)

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._linear.gated(x_TI) if x_TI.shape[0] == 1 else super().__call__(x_TI)


class GPULinearMethod(PlainLinearMethod):
    """Keeps the weight as it is."""

    @override
    def gated(
        self,
        weight_OI: Tensor | Weight,
        bias_O: Tensor | None,
        kernels: LayerKernels,
        activation: Activation = Activation.SILU,
    ) -> Linear:
        if activation is not Activation.SILU:
            return super().gated(weight_OI, bias_O, kernels, activation)
        return GatedGPULinear(self._linear(dense(weight_OI), bias_O), kernels)

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> GPULinear:
        return GPULinear(weight_OI, bias_O)


class GPUInt8Linear(AcceleratorInt8Linear):
    """int8 by three operators; by two for a single row: it needs no padding rows, unlike cuBLASLt's product."""

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI, x_TI.dtype)

    @override
    def as_float(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI, torch.float32)

    def _product(self, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
        rows = x_TI.shape[0]
        if not rows:
            return x_TI.new_empty(0, self.out_features, dtype=dtype)
        least = 0 if rows == 1 else LEAST_ROWS
        values, scale_T1 = gpu_operators.quantised_rows(
            self._turned(x_TI), torch.int8, padding=self._padding, most=MOST, least_rows=least
        )
        if rows == 1:
            weight_OI = self._weight_IO.t()
            return gpu_operators.whole_row_product(values, scale_T1, weight_OI, self._scale, self._bias, dtype)
        sums = torch._int_mm(values, self._weight_IO)
        return gpu_operators.rescaled(sums, self._scale, scale_T1, self._bias, dtype)


class GPUInt8Method(AcceleratorInt8Method):
    """Quantises as it loads: no calibration."""

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return GPUInt8Linear(weight_OI, bias_O)

    def _whole(self, rows: WholeRows, bias_O: Tensor | None) -> Linear:
        return GPUInt8Linear(rows, bias_O)


class GPUFp8Linear(fp8.Fp8Linear):
    """fp8 with one operator that quantises the rows."""

    def _quantised(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        return gpu_operators.quantised_rows(x_TI, fp8.E4M3, padding=self._padding, most=fp8.MOST, least=fp8.LEAST)


class GPUFp8Method(fp8.Fp8LinearMethod):
    """Quantises as it loads; the head stays unchanged."""

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return GPUFp8Linear(weight_OI, bias_O)

    @override
    def head(self, weight_VI: Tensor | Weight) -> Linear:
        return GPULinear(dense(weight_VI), None)


class TritonKernels(LayerKernels):
    """Kernels that read every row once. Gates other than SiLU's are torch's."""

    name = "triton"

    @override
    def rms_norm(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        return gpu_operators.rms_norm(x_TI, weight_I, eps)

    @override
    def add_rms_norm(self, hidden_TI: Tensor, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        return gpu_operators.add_rms_norm(hidden_TI, x_TI, weight_I, eps)

    @override
    def rms_norm_once(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """The only difference is a weight in float32."""
        return gpu_operators.rms_norm(x_TI, weight_I, eps)

    @override
    def add_rms_norm_once(self, hidden_TI: Tensor, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        return gpu_operators.add_rms_norm(hidden_TI, x_TI, weight_I, eps)

    @override
    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        return gpu_operators.silu_mul(gate_up_TF)
