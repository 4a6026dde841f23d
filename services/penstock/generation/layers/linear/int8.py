"""int8 by oneDNN: a scale for each output and, computed anew for each row of x, one for the row. The blocks of x are
turned first (rounding/rotation.py). It serves when there are no C++ kernels. Its numbers are theirs, except for the
order of the sums that turn x: here one product does it.

Every CPU gives the same sums of the same whole numbers. oneDNN's product takes unsigned x. So x is moved up by 128. On
CPUs without VNNI, where bytes above 127 would saturate, the positive and negative numbers of x become rows of one
product instead, which reads the weight once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from penstock.common.errors import StartupError
from penstock.generation.host.cpu_features import Int8Product, int8_product
from penstock.generation.layers.linear.base import (
    Linear,
    LinearMethod,
    WholeRows,
    check_finite,
)
from penstock.generation.rounding.rotation import (
    halved,
    natural_scale,
    rotated,
    rotated_by_product,
    rotation_block,
    rotation_matrix,
)

MOST = 127.0


def check_int8_product(quantization: str) -> None:
    """Raise StartupError naming --quantization if oneDNN has no correct product of bytes."""
    if int8_product() is Int8Product.MISSING:
        raise StartupError(
            f"--quantization {quantization} needs oneDNN's product of bytes, which is missing or wrong here: build the "
            "C++ kernels (`make kernels` or `penstock build-kernels`)",
            flag="--quantization",
        )


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers in [-127, 127] as float32, and the scale of each row (T, 1): symmetrical, by the largest
    magnitude."""
    x = x_TI.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    # A true division, which `127.0 / tensor` is not: it gives the C++ kernels' bits.
    inverse = torch.where(largest > 0, torch.full_like(largest, MOST).div_(largest), 0.0)
    return (x * inverse).round(), largest / MOST


def int8_numbers(weight_OI: Tensor | WholeRows) -> tuple[Tensor, Tensor, int]:
    """Return a weight's whole numbers, the scale of each output (O, 1), and the inputs of a block in which it and its x
    are turned. One that is whole numbers keeps them, and is not turned."""
    if not isinstance(weight_OI, Tensor):
        return weight_OI.values, weight_OI.scale[:, None], 1
    block = rotation_block(weight_OI.shape[1])
    values, scale = quantize_rows(rotated(weight_OI, block))
    return values, scale / block, block


class Int8Linear(Linear):
    """A linear layer with weights of one byte each."""

    def __init__(self, weight_OI: Tensor | WholeRows, bias_O: Tensor | None) -> None:
        """Take a weight to quantise, or one that is whole numbers."""
        values, scale, self._block = int8_numbers(weight_OI)
        self._matrix = rotation_matrix(self._block, torch.float32, values.device)
        # What `rotated_by_product` takes off x.
        scale = scale * halved(self._block)
        self.out_features, self.in_features = values.shape
        check_finite(scale)
        self._packed = torch.ops.onednn.qlinear_prepack(values.to(torch.int8), None)
        self._scale = scale.flatten().contiguous()
        self._zero = torch.zeros(self.out_features, dtype=torch.int32)
        self._bias = None if bias_O is None else bias_O.float()
        self._saturates = int8_product() is not Int8Product.EXACT
        # Two products are taken from each other as whole numbers, which float32 has up to 2**24: scaled ones would be
        # rounded before.
        self._scale_of_product = torch.ones_like(self._scale) if self._saturates else self._scale

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.as_float(x_TI).to(x_TI.dtype)

    @override
    def as_float(self, x_TI: Tensor) -> Tensor:
        if not x_TI.shape[0]:
            return x_TI.new_empty(0, self.out_features, dtype=torch.float32)
        values, scale = quantize_rows(rotated_by_product(x_TI.float(), self._matrix))
        if self._saturates:
            positive, negative = self._product(torch.cat([values, -values]).clamp_(min=0.0), 0).chunk(2)
            sums = positive.sub_(negative).mul_(self._scale)
        else:
            sums = self._product(values + 128.0, 128)
        result = sums.mul_(scale)
        return result if self._bias is None else result.add_(self._bias)

    def _product(self, values_TI: Tensor, zero: int) -> Tensor:
        """Product of 0 <= `values_TI` <= 255, less `zero`, times the outputs' scales unless it saturates. oneDNN has
        one scale for all of x: ours are applied after it."""
        result: Tensor = torch.ops.onednn.qlinear_pointwise(
            values_TI.to(torch.uint8), 1.0, zero, self._packed, self._scale_of_product, self._zero, None, 1.0, 0,
            torch.float32, "none", [], "",
        )  # fmt: skip
        return result

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
        """The blocked layout's padding is not counted."""
        bias = 0 if self._bias is None else self._bias.nbytes
        return self.in_features * self.out_features + self._scale.nbytes + self._zero.nbytes + bias


class Int8LinearMethod(LinearMethod):
    """Quantises as it loads: no calibration."""

    name = "int8"

    def __init__(self) -> None:
        """Make the method. Raises StartupError naming --quantization if there is no int8."""
        check_int8_product(self.name)

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return Int8Linear(weight_OI, bias_O)

    def _whole(self, rows: WholeRows, bias_O: Tensor | None) -> Linear:
        return Int8Linear(rows, bias_O)
