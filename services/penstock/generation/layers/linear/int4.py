"""int4 by torch: groups of 32 inputs share a scale and a zero. x stays as it is; the C++ kernels quantise it too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.generation.layers.linear.base import (
    INT4,
    INT4_ASYMMETRIC,
    Linear,
    LinearMethod,
    Weight,
    WholeRows,
    check_finite,
    dense,
    importance,
)
from penstock.generation.layers.linear.int4_search import GROUP, search_rows
from penstock.generation.layers.linear.int8 import Int8Linear, check_int8_product

# torch packs the outputs in blocks of this many.
_BLOCK = 64
_INNER_TILES = 8


def quantize_groups(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return values 0..15 (O, I) as int32, which mean (value - 8) * scale, and the scales (O, groups) in bfloat16.

    The largest magnitude of a group becomes -8, so that all 16 values are used (as in GGML's q4_0). It is for products
    without zeros. Inputs are padded to whole groups.
    """
    weight = F.pad(weight_OI.float(), (0, -weight_OI.shape[1] % GROUP)).view(weight_OI.shape[0], -1, GROUP)
    largest = weight.gather(2, weight.abs().argmax(dim=2, keepdim=True))
    scale = (largest / -8.0).bfloat16()
    inverse = torch.where(scale != 0, 1.0 / scale.float(), 0.0)
    values = (weight * inverse).round().add_(8).clamp_(0, 15)
    return values.flatten(1).int(), scale.squeeze(2)


def _torch_zero(scale: Tensor, offset: Tensor, rounded: Tensor) -> Tensor:
    """Return torch's zero of `offset`, so that (value - 8) * `rounded` + zero is 0 for the value for which
    value * `scale` + offset is."""
    is_constant = scale == 0
    steps = offset / torch.where(is_constant, 1.0, scale) + 8.0
    return torch.where(is_constant, offset, steps * rounded)


@dataclass(frozen=True, slots=True)
class Int4Numbers:
    """A weight in the format of torch's int4 products, padded to whole groups of inputs and whole blocks of outputs."""

    # Outputs and inputs without padding.
    shape: tuple[int, int]
    # int4 or int4-asymmetric.
    form: str
    # From 0 to 15, int32; they mean (value - 8) * scale + zero.
    values_OI: Tensor
    # bfloat16 (groups, outputs, 2).
    scale_and_zero: Tensor

    @classmethod
    def of(cls, weight_OI: Tensor | WholeRows, *, outputs: int, importance_I: Tensor | None = None) -> Int4Numbers:
        """Quantise a weight, or take one that is whole numbers; there are a multiple of `outputs` rows. Raises
        NotFinite."""
        is_dense = isinstance(weight_OI, Tensor)
        whole = search_rows(weight_OI, importance_I).whole() if isinstance(weight_OI, Tensor) else weight_OI
        rows, inputs = whole.values.shape
        values = F.pad(whole.values, (0, -inputs % GROUP, 0, -rows % outputs), value=8).int()
        scale = F.pad(whole.scale, (0, 0, 0, -rows % outputs)).bfloat16()
        check_finite(scale)
        zero = torch.zeros_like(scale)
        if whole.offset is not None:
            check_finite(whole.offset)
            zero[:rows] = _torch_zero(whole.scale, whole.offset, scale[:rows])
        form = INT4 if is_dense or whole.offset is None else INT4_ASYMMETRIC
        return cls((rows, inputs), form, values, torch.stack([scale, zero], dim=2).transpose(0, 1).contiguous())


class GroupedInt4(Linear):
    """A linear layer with weights of half a byte each, and 1/8 byte for scales and zeros, without its product."""

    def __init__(self, numbers: Int4Numbers, packed: Tensor, bias_O: Tensor | None) -> None:
        """`packed`: the numbers' values as the product wants them."""
        self.out_features, self.in_features = numbers.shape
        self._form = numbers.form
        self._packed = packed
        self._scale_and_zero = numbers.scale_and_zero
        self._bias = None if bias_O is None else bias_O.float()
        self._padding = numbers.values_OI.shape[1] - self.in_features

    @property
    @override
    def quantised_as(self) -> str:
        return self._form

    @property
    @override
    def mean_scale(self) -> float:
        """Padding outputs are left out."""
        return float(self._scale_and_zero[:, : self.out_features, 0].float().abs().mean())

    @property
    @override
    def num_bytes(self) -> int:
        own: int = self._packed.nbytes + self._scale_and_zero.nbytes
        return own + (0 if self._bias is None else self._bias.nbytes)


class Int4Linear(GroupedInt4):
    """The product of torch's operator for CPUs."""

    def __init__(
        self, weight_OI: Tensor | WholeRows, bias_O: Tensor | None, importance_I: Tensor | None = None
    ) -> None:
        """Take a weight to quantise, or one that is whole numbers; scales and offsets are rounded to bfloat16."""
        numbers = Int4Numbers.of(weight_OI, outputs=_BLOCK, importance_I=importance_I)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.values_OI, _INNER_TILES)
        super().__init__(numbers, packed, bias_O)

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.as_float(x_TI).to(x_TI.dtype)

    @override
    def as_float(self, x_TI: Tensor) -> Tensor:
        if not x_TI.shape[0]:
            return x_TI.new_empty(0, self.out_features, dtype=torch.float32)
        x = F.pad(x_TI, (0, self._padding)).bfloat16()
        found = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, GROUP, self._scale_and_zero)
        result: Tensor = found[:, : self.out_features].float()
        return result if self._bias is None else result + self._bias


class Int4LinearMethod(LinearMethod):
    """Quantises as it loads; the head is int8, since rounding hurts most there."""

    name = "int4"
    weighs_inputs = True

    def __init__(self) -> None:
        """Make the method. Raises StartupError naming --quantization if the head's int8 is not possible."""
        check_int8_product(self.name)

    @override
    def linear(self, weight_OI: Tensor | Weight, bias_O: Tensor | None) -> Linear:
        return Int4Linear(dense(weight_OI), bias_O, importance(weight_OI))

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return Int4Linear(weight_OI, bias_O)

    def _whole(self, rows: WholeRows, bias_O: Tensor | None) -> Linear:
        return Int4Linear(rows, bias_O)

    @override
    def head(self, weight_VI: Tensor | Weight) -> Linear:
        return Int8Linear(dense(weight_VI), None)
