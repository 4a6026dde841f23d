"""fp8 by torch._scaled_mm: numbers of e4m3, a scale for each output and, computed anew for each row of x, one for the
row. The sums are in float32, their result in bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.generation.layers.linear.base import Linear, LinearMethod, Weight, check_finite, dense
from penstock.generation.layers.linear.dense import PlainLinear
from penstock.generation.layers.linear.gpu import GPULinear

if TYPE_CHECKING:
    from types import ModuleType

_E4M3 = torch.float8_e4m3fn
_MOST = torch.finfo(_E4M3).max
# Inputs and outputs come in multiples of this.
MULTIPLE = 16
# Of a row of zeros, which any scale gives.
_LEAST = 1e-12


def quantize_rows_fp8(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers as e4m3, and each row's scale (T, 1) in float32, by which its largest magnitude becomes the
    format's largest number."""
    x = x_TI.float()
    scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(_LEAST) / _MOST
    return (x / scale).clamp_(-_MOST, _MOST).to(_E4M3), scale


class Fp8Linear(Linear):
    """A linear layer with weights of one byte each."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, operators: ModuleType | None = None) -> None:
        """Take a weight to quantise. `operators`: attention.gpu_operators where there is Triton."""
        self._operators = operators
        self.out_features, self.in_features = weight_OI.shape
        self._padding = -self.in_features % MULTIPLE
        padded = F.pad(weight_OI, (0, self._padding, 0, -self.out_features % MULTIPLE))
        values, scale = quantize_rows_fp8(padded)
        check_finite(scale[: self.out_features])
        # (inputs, outputs), a column at a time: the layout that the product reads.
        self._weight_IO = values.t()
        self._scale_1O = scale.t().contiguous()
        self._bias = None if bias_O is None else bias_O.float()

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See Linear."""
        return self._product(x_TI, x_TI.dtype)

    def as_float(self, x_TI: Tensor) -> Tensor:
        """See Linear: of a product that is rounded to bfloat16."""
        return self._product(x_TI, torch.float32)

    def _product(self, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
        if not x_TI.shape[0]:
            return x_TI.new_empty(0, self.out_features, dtype=dtype)
        if self._operators is None:
            values, scale_T1 = quantize_rows_fp8(F.pad(x_TI, (0, self._padding)))
        else:
            values, scale_T1 = self._operators.quantised_rows(x_TI, _E4M3, padding=self._padding)
        found = torch._scaled_mm(values, self._weight_IO, scale_T1, self._scale_1O, out_dtype=torch.bfloat16)
        found = found[:, : self.out_features].contiguous()
        result = found if self._bias is None else found.float() + self._bias
        return result.to(dtype)

    @property
    def num_bytes(self) -> int:
        """See Linear."""
        return self._weight_IO.nbytes + self._scale_1O.nbytes + (0 if self._bias is None else self._bias.nbytes)


class Fp8LinearMethod(LinearMethod):
    """Quantises as it loads; the head stays as it is, since rounding hurts most there."""

    name = "fp8"

    def __init__(self, operators: ModuleType | None = None) -> None:
        """See Fp8Linear."""
        self._operators = operators

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return Fp8Linear(weight_OI, bias_O, self._operators)

    def head(self, weight_VI: Tensor | Weight) -> Linear:
        """See LinearMethod."""
        weight = dense(weight_VI)
        return PlainLinear(weight, None) if self._operators is None else GPULinear(weight, None, self._operators)
