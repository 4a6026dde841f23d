"""int8 by torch._int_mm, which accelerators have: a scale for each output and, computed anew for each row of x, one for
the row, as on the CPU (int8.py). The sums are of whole numbers: every device gives the same sums. Blocks of x are
turned by a product in float32 with an order of sums of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.generation.layers.linear.base import Linear, LinearMethod, WholeRows, check_finite
from penstock.generation.layers.linear.int8 import int8_numbers, quantize_rows
from penstock.generation.rounding.rotation import halved, natural_scale, rotated_by_product, rotation_matrix

# What cuBLASLt's product takes: more rows than 16, and multiples of 8 of inputs and outputs.
LEAST_ROWS = 17
MULTIPLE = 8


class AcceleratorInt8Linear(Linear):
    """A linear layer with weights of one byte each."""

    def __init__(self, weight_OI: Tensor | WholeRows, bias_O: Tensor | None) -> None:
        """Take a weight to quantise, or one that is whole numbers."""
        values, scale, self._block = int8_numbers(weight_OI)
        self._matrix = rotation_matrix(self._block, torch.float32, values.device)
        # What `rotated_by_product` takes off x.
        scale = scale * halved(self._block)
        self.out_features, self.in_features = values.shape
        check_finite(scale)
        self._padding = -self.in_features % MULTIPLE
        # (inputs, outputs), a column at a time: the layout that the product reads.
        self._weight_IO = (
            F.pad(values.to(torch.int8), (0, self._padding, 0, -self.out_features % MULTIPLE)).contiguous().t()
        )
        self._scale = scale.flatten().contiguous()
        self._bias = None if bias_O is None else bias_O.float().contiguous()

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.as_float(x_TI).to(x_TI.dtype)

    @override
    def as_float(self, x_TI: Tensor) -> Tensor:
        rows = x_TI.shape[0]
        if not rows:
            return x_TI.new_empty(0, self.out_features, dtype=torch.float32)
        values, scale_T1 = quantize_rows(self._turned(x_TI))
        values = F.pad(values.to(torch.int8), (0, self._padding, 0, max(0, LEAST_ROWS - rows)))
        sums = torch._int_mm(values, self._weight_IO)[:rows, : self.out_features]
        result = sums.float().mul_(self._scale).mul_(scale_T1)
        return result if self._bias is None else result.add_(self._bias)

    def _turned(self, x_TI: Tensor) -> Tensor:
        return x_TI if self._matrix is None else rotated_by_product(x_TI.float(), self._matrix)

    @property
    @override
    def quantised_as(self) -> str:
        return "int8"

    @property
    @override
    def mean_scale(self) -> float:
        return natural_scale(float(self._scale.mean()) / halved(self._block), self._block)

    @property
    @override
    def num_bytes(self) -> int:
        return self._weight_IO.nbytes + self._scale.nbytes + (0 if self._bias is None else self._bias.nbytes)


class AcceleratorInt8Method(LinearMethod):
    """Quantises as it loads: no calibration."""

    name = "int8"

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return AcceleratorInt8Linear(weight_OI, bias_O)

    def _whole(self, rows: WholeRows, bias_O: Tensor | None) -> Linear:
        return AcceleratorInt8Linear(rows, bias_O)
