"""fp8 by torch._scaled_mm: numbers of e4m3, a scale for each output and, computed anew for each row of x, one for the
row. The sums are in float32, their result in bfloat16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.generation.layers.linear.base import Linear, LinearMethod, Weight, check_finite, dense
from penstock.generation.layers.linear.dense import PlainLinear

E4M3 = torch.float8_e4m3fn
MOST = torch.finfo(E4M3).max
# Inputs and outputs come in multiples of this.
MULTIPLE = 16
# Of a row of zeros, which any scale gives.
LEAST = 1e-12


def quantize_rows_fp8(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers as e4m3, and each row's scale (T, 1) in float32, by which its largest magnitude becomes the
    format's largest number."""
    x = x_TI.float()
    scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(LEAST) / MOST
    return (x / scale).clamp_(-MOST, MOST).to(E4M3), scale


class Fp8Linear(Linear):
    """A linear layer with weights of one byte each."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        """Take a weight to quantise."""
        self.out_features, self.in_features = weight_OI.shape
        self._padding = -self.in_features % MULTIPLE
        padded = F.pad(weight_OI, (0, self._padding, 0, -self.out_features % MULTIPLE))
        values, scale = quantize_rows_fp8(padded)
        check_finite(scale[: self.out_features])
        # (inputs, outputs), a column at a time: the layout that the product reads.
        self._weight_IO = values.t()
        self._scale_1O = scale.t().contiguous()
        self._bias = None if bias_O is None else bias_O.float()

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI, x_TI.dtype)

    @override
    def as_float(self, x_TI: Tensor) -> Tensor:
        """Numbers of a product that is rounded to bfloat16."""
        return self._product(x_TI, torch.float32)

    def _product(self, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
        if not x_TI.shape[0]:
            return x_TI.new_empty(0, self.out_features, dtype=dtype)
        values, scale_T1 = self._quantised(x_TI)
        found = torch._scaled_mm(values, self._weight_IO, scale_T1, self._scale_1O, out_dtype=torch.bfloat16)
        found = found[:, : self.out_features].contiguous()
        result = found if self._bias is None else found.float() + self._bias
        return result.to(dtype)

    def _quantised(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows padded, in e4m3, and their scales."""
        return quantize_rows_fp8(F.pad(x_TI, (0, self._padding)))

    @property
    @override
    def num_bytes(self) -> int:
        return self._weight_IO.nbytes + self._scale_1O.nbytes + (0 if self._bias is None else self._bias.nbytes)


class Fp8LinearMethod(LinearMethod):
    """Quantises as it loads; the head stays as it is, since rounding hurts most there."""

    name = "fp8"

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return Fp8Linear(weight_OI, bias_O)

    @override
    def head(self, weight_VI: Tensor | Weight) -> Linear:
        return PlainLinear(dense(weight_VI), None)
