"""How a linear layer's weights are kept and multiplied. One file per number format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from penstock.generation.models.kernels import LayerKernels

# (ids) -> (ids, features) of the weight's rows.
Rows = Callable[[Tensor], Tensor]


class Linear(ABC):
    """y = x Wᵀ + b with the weight in whatever form its method chose. Immutable after construction."""

    in_features: int
    out_features: int

    @abstractmethod
    def __call__(self, x_TI: Tensor) -> Tensor:
        """(rows, in) -> (rows, out), in x's dtype, contiguous."""

    def as_float(self, x_TI: Tensor) -> Tensor:
        """The same in float32, unrounded where the method can."""
        return self(x_TI).float()

    def rows(self) -> Rows | None:
        """A lookup in the very weight that it was made of, for an embedding that shares it; None: it is not kept."""
        return None

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

    def gated(self, weight_OI: Tensor, bias_O: Tensor | None, kernels: LayerKernels) -> Linear:
        """silu(first half of the outputs) * second half, as one Linear with half of `weight_OI`'s outputs."""
        return _Gated(self.linear(weight_OI, bias_O), kernels)

    def head(self, weight_VI: Tensor) -> Linear:
        """The last layer, which gives the logits: where rounding hurts most."""
        return self.linear(weight_VI, None)


class _Gated(Linear):
    def __init__(self, linear: Linear, kernels: LayerKernels) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features // 2
        self._linear = linear
        self._kernels = kernels

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._kernels.silu_mul(self._linear(x_TI))

    @property
    def num_bytes(self) -> int:
        return self._linear.num_bytes
