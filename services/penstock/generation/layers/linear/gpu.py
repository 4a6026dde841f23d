"""Linear layers of a GPU: torch's own, and for a single row a product of ours, which reads the weight faster than
cuBLAS does (docs/guide/cuda.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from penstock.generation.core.model_config import Activation
from penstock.generation.layers.linear.base import Gated, Linear, LinearMethod, Weight, dense
from penstock.generation.layers.linear.dense import PlainLinear

if TYPE_CHECKING:
    from types import ModuleType

    from penstock.generation.layers.kernels import LayerKernels


class GPULinear(PlainLinear):
    """A weight as it is."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, operators: ModuleType) -> None:
        """Take over the weight; `operators` is the module attention.gpu_operators."""
        super().__init__(weight_OI.contiguous(), bias_O)
        self._operators = operators

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See Linear."""
        if x_TI.shape[0] != 1:
            return super().__call__(x_TI)
        return cast("Tensor", self._operators.row_product(x_TI, self._weight, self._bias, x_TI.dtype))

    def as_float(self, x_TI: Tensor) -> Tensor:
        """See Linear."""
        if x_TI.shape[0] != 1:
            return super().as_float(x_TI)
        return cast("Tensor", self._operators.row_product(x_TI, self._weight, self._bias, torch.float32))

    def gated(self, x_1I: Tensor) -> Tensor:
        """Return silu(first half of the outputs) * second half for a single row."""
        return cast("Tensor", self._operators.gated_row_product(x_1I, self._weight, self._bias))


class GatedGPULinear(Gated):
    """silu(first half of a linear layer's outputs) * second half; one operator for a single row."""

    def __init__(self, linear: GPULinear, kernels: LayerKernels) -> None:
        """Take the layer with both halves."""
        super().__init__(linear, kernels.silu_mul)
        self._both = linear

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See Linear."""
        return self._both.gated(x_TI) if x_TI.shape[0] == 1 else super().__call__(x_TI)


class GPULinearMethod(LinearMethod):
    """Keeps the weight as it is."""

    name = "gpu"

    def __init__(self, operators: ModuleType) -> None:
        """Take the module attention.gpu_operators."""
        self._operators = operators

    def gated(
        self,
        weight_OI: Tensor | Weight,
        bias_O: Tensor | None,
        kernels: LayerKernels,
        activation: Activation = Activation.SILU,
    ) -> Linear:
        """See LinearMethod."""
        if activation is not Activation.SILU:
            return super().gated(weight_OI, bias_O, kernels, activation)
        return GatedGPULinear(self._linear(dense(weight_OI), bias_O), kernels)

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> GPULinear:
        return GPULinear(weight_OI, bias_O, self._operators)
