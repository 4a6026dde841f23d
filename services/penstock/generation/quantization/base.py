"""How a linear layer's weights are kept and multiplied. One file per number format."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Linear(ABC):
    """y = x Wᵀ + b with the weight in whatever form its method chose. Immutable after construction."""

    in_features: int
    out_features: int

    @abstractmethod
    def __call__(self, x_TI: Tensor) -> Tensor:
        """(rows, in) -> (rows, out), in x's dtype, contiguous."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory that the weight and bias take."""


class LinearMethod(ABC):
    """Turns dense weights into Linears at load time."""

    name: str
    # Whether a Linear goes on using the very tensor it was given, rather than a packed copy.
    keeps_weight: bool

    @abstractmethod
    def linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        """Take over (out, in) `weight_OI`; the caller drops its reference, so no second copy stays in memory."""
