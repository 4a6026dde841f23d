"""Products of the heads of an attention with a matrix each.

Shape suffixes: T rows, H heads, O outputs and X inputs of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from penstock.generation.layers.layer_kernels import LayerKernels, NativeKernels
from penstock.generation.layers.linear.native import Format, part_sizes


class HeadProducts(Protocol):
    """A matrix for each head."""

    @property
    def copied_bytes(self) -> int:
        """Memory that it takes beside the matrices that it was made of."""

    def __call__(self, x_THX: Tensor, out_THO: Tensor) -> None:
        """Fill `out_THO` with each head's product. Both may be views with a head's numbers side by side."""


class BatchedProducts:
    """The products as one of torch."""

    copied_bytes = 0

    def __init__(self, weight_HOX: Tensor) -> None:
        """Take the matrices, which may be a view."""
        self._weight_HXO = weight_HOX.transpose(1, 2)

    def __call__(self, x_THX: Tensor, out_THO: Tensor) -> None:
        out_THO.copy_(torch.bmm(x_THX.transpose(0, 1), self._weight_HXO).transpose(0, 1))


class PackedProducts(HeadProducts):
    """The products by the C++ kernels (csrc/linear/ops_heads.cpp), which read matrices in panels.

    A row has the same bits with any rows beside it.
    """

    def __init__(self, weight_HOX: Tensor) -> None:
        """Pack the matrices, in bfloat16 or float32. In bfloat16 a head has an even number of inputs."""
        heads, outputs, inputs = weight_HOX.shape
        self.format = Format.BF16 if weight_HOX.dtype is torch.bfloat16 else Format.F32
        _, num_bytes = part_sizes((outputs, inputs), self.format, gated=False, has_bias=False)["weight"]
        self.packed = torch.empty((heads, num_bytes), dtype=torch.uint8)
        scales, sums = torch.empty(0), torch.empty(0, dtype=torch.int32)
        for weight_OX, packed in zip(weight_HOX, self.packed, strict=True):
            rows = weight_OX.contiguous()
            torch.ops.penstock.pack_rows(rows, 0, outputs, packed, scales, sums, int(self.format), False, None)
        self._multiply: Callable[[Tensor, Tensor, Tensor], None] = torch.ops.penstock.head_products.default

    @property
    @override
    def copied_bytes(self) -> int:
        return self.packed.nbytes

    @override
    def __call__(self, x_THX: Tensor, out_THO: Tensor) -> None:
        self._multiply(x_THX, self.packed, out_THO)


def head_products(weight_HOX: Tensor, kernels: LayerKernels) -> HeadProducts:
    """Return the products of a matrix (outputs, inputs) for each head, by the kernels that the layer has."""
    # Of bfloat16 the kernels read pairs.
    has_pairs = weight_HOX.dtype is not torch.bfloat16 or weight_HOX.shape[2] % 2 == 0
    if isinstance(kernels, NativeKernels) and has_pairs:
        return PackedProducts(weight_HOX)
    return BatchedProducts(weight_HOX)


class HeadCopies:
    """Packed products of heads by the matrix that they were made of: models made anew with the same matrix, as
    WriteWeights makes them, share them."""

    def __init__(self) -> None:
        self._products = WeakTensorKeyDictionary()

    def of(self, matrix: Tensor, make: Callable[[], tuple[HeadProducts, ...]]) -> tuple[HeadProducts, ...]:
        """Return what `make` makes of `matrix`: of packed products the same as long as the matrix lives."""
        if matrix in self._products:
            known: tuple[HeadProducts, ...] = self._products[matrix]
            return known
        made = make()
        # Views of the matrix would keep it alive.
        if all(one.copied_bytes for one in made):
            self._products[matrix] = made
        return made


COPIES = HeadCopies()
