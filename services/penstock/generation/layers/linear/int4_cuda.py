"""int4 by torch's CUDA operators: groups of 32 inputs share a scale and a zero; x is bfloat16 in the product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.generation.layers.linear.base import Linear, LinearMethod, Weight, WholeRows, dense, importance
from penstock.generation.layers.linear.int4 import GroupedInt4, Int4Numbers
from penstock.generation.layers.linear.int4_search import GROUP
from penstock.generation.layers.linear.int8_accelerator import AcceleratorInt8Linear

# Outputs are packed in tiles of 8, inputs in tiles of 16; a thread has 2, 4 or 8 of these in succession.
_OUTPUTS, _TILE = 8, 16
_INNER_TILES = (8, 4, 2)


class CudaInt4Linear(GroupedInt4):
    """The product of torch's operator for CUDA."""

    def __init__(
        self, weight_OI: Tensor | WholeRows, bias_O: Tensor | None, importance_I: Tensor | None = None
    ) -> None:
        """Take a weight to quantise, or one that is whole numbers; scales and offsets are rounded to bfloat16."""
        numbers = Int4Numbers.of(weight_OI, outputs=_OUTPUTS, importance_I=importance_I)
        values = numbers.values_OI
        inner = next(tiles for tiles in _INNER_TILES if not values.shape[1] % (tiles * _TILE))
        # Two values a byte, the first in the upper half.
        halves = (values[:, ::2] << 4 | values[:, 1::2]).to(torch.uint8)
        super().__init__(numbers, torch.ops.aten._convert_weight_to_int4pack(halves, inner), bias_O)

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
        x = (F.pad(x_TI, (0, self._padding)) if self._padding else x_TI).bfloat16()
        found = torch.ops.aten._weight_int4pack_mm(x, self._packed, GROUP, self._scale_and_zero)
        found = found[:, : self.out_features].contiguous()
        result: Tensor = found if self._bias is None else found.float() + self._bias
        return result.to(dtype)


class CudaInt4Method(LinearMethod):
    """Quantises as it loads; the head is int8, since rounding hurts most there."""

    name = "int4"
    weighs_inputs = True

    def __init__(self, head: type[AcceleratorInt8Linear] = AcceleratorInt8Linear) -> None:
        """Take the class of the head."""
        self._head = head

    @override
    def linear(self, weight_OI: Tensor | Weight, bias_O: Tensor | None) -> Linear:
        return CudaInt4Linear(dense(weight_OI), bias_O, importance(weight_OI))

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return CudaInt4Linear(weight_OI, bias_O)

    def _whole(self, rows: WholeRows, bias_O: Tensor | None) -> Linear:
        return CudaInt4Linear(rows, bias_O)

    @override
    def head(self, weight_VI: Tensor | Weight) -> Linear:
        return self._head(dense(weight_VI), None)
