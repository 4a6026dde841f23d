"""4-bit floats of compressed-tensors (NVFP4, MXFP4): groups of inputs of an output, each with a scale of its own.

weight_packed is uint8 (outputs, inputs / 2): of a byte the lower half comes first. A half is a sign and one of 0, 0.5,
1, 1.5, 2, 3, 4 and 6. NVFP4: weight_scale is float8 for 16 inputs, over the one float of weight_global_scale. MXFP4:
weight_scale is an exponent for 32 inputs, 127 for 1, which is GGUF's block of that name in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.weights.quantised.base import FLOATS, Part, StoredMatrix, lying
from penstock.generation.weights.quantised.mxfp4 import gguf_rows

_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_NUMBERS = torch.cat([_NUMBERS, -_NUMBERS])
_GLOBAL = "weight_global_scale"
_NOT_A_NUMBER = 255


@dataclass(frozen=True, slots=True)
class Fp4Kind:
    """A `format` of compressed-tensors with such numbers."""

    # In words.
    name: str
    strategy: str
    group: int
    # Of weight_scale.
    dtype: str
    has_global: bool

    def parts(self, shape: tuple[int, int]) -> dict[str, Part]:
        """Return the tensors of such a matrix (outputs, inputs)."""
        outputs, inputs = shape
        parts = {
            "weight_packed": Part((outputs, -(-inputs // 2)), ("U8",)),
            "weight_scale": Part((outputs, -(-inputs // self.group)), (self.dtype,)),
        }
        if self.has_global:
            parts[_GLOBAL] = Part((1,), FLOATS)
        return parts

    def open(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Fp4Matrix:
        """Return the matrix of these tensors. Raises StartupError naming one that means no numbers."""
        scale = tensors["weight_scale"]
        if not self.has_global:
            if bool((scale == _NOT_A_NUMBER).any()):
                raise lying(module, "weight_scale", "has an exponent of 255, which is no number")
            return Fp4Matrix(shape, tensors["weight_packed"], scale, 1.0, self.group)
        divisor = float(tensors[_GLOBAL])
        if not 0.0 < divisor < float("inf"):
            raise lying(module, _GLOBAL, f"is {divisor:g}, and scales are divided by it: it must be above 0")
        return Fp4Matrix(shape, tensors["weight_packed"], scale, divisor, self.group)


FP4_KINDS = {
    "nvfp4-pack-quantized": Fp4Kind("nvfp4", "tensor_group", 16, "F8_E4M3", has_global=True),
    "mxfp4-pack-quantized": Fp4Kind("mxfp4", "group", 32, "U8", has_global=False),
}


@dataclass(frozen=True, slots=True)
class Fp4Matrix(StoredMatrix):
    """4-bit floats with a scale of each group of inputs, over one divisor."""

    shape: tuple[int, int]
    # (outputs, inputs / 2)
    packed: Tensor
    # (outputs, groups): float8, or exponents in uint8.
    scale: Tensor
    divisor: float
    group: int
    block_type: str = field(init=False)

    def __post_init__(self) -> None:
        is_whole = self.scale.dtype is torch.uint8 and not self.shape[1] % self.group
        object.__setattr__(self, "block_type", "MXFP4" if is_whole else "")

    @override
    def rows(self, first: int, last: int) -> Tensor:
        packed, scale = self.packed[first:last], self.scale[first:last]
        numbers = _NUMBERS[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).int()][:, : self.shape[1]]
        has_exponents = scale.dtype is torch.uint8
        wide = torch.exp2(scale.float() - 127.0) if has_exponents else scale.float() / self.divisor
        return numbers.mul_(wide.repeat_interleave(self.group, dim=1)[:, : self.shape[1]])

    @override
    def block_rows(self, first: int, last: int) -> Tensor:
        packed = self.packed[first:last].view(last - first, -1, self.group // 2)
        return gguf_rows(packed, self.scale[first:last])
