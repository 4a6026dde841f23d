"""Answers of a source of tensors that keeps no matrix in a form of whole numbers or in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch import Tensor


class PlainTensors:
    """The half of `checkpoint_weights.TensorSource` that is about quantised matrices, where there are none."""

    def is_quantised(self, tensor: str) -> bool:
        return False

    def form(self, tensor: str) -> str:
        return ""

    def whole_pieces(self, tensor: str, *, multiple: int = 1) -> NoReturn:
        raise TypeError(f"{tensor} is not kept as whole numbers")

    def block_type(self, tensor: str) -> str:
        return ""

    def block_pieces(self, tensor: str, *, multiple: int = 1) -> NoReturn:
        raise TypeError(f"{tensor} has no blocks")

    def block_row(self, tensor: str, number: int) -> Tensor:
        raise TypeError(f"{tensor} has no blocks")
