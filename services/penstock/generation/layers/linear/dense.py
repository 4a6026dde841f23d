"""Linear layers in the model's own dtype: packed once for oneDNN on CPU, or plain without oneDNN."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.generation.host.cpu_features import packing_obstacle
from penstock.generation.layers.linear.base import Linear, LinearMethod, Rows


class PlainLinear(Linear):
    """torch's own linear layer: right on accelerators; on CPU it repacks the weight on every call."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self._weight = weight_OI
        self._bias = bias_O

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self._weight, self._bias)

    @override
    def rows(self) -> Rows | None:
        return partial(F.embedding, weight=self._weight)

    @property
    @override
    def num_bytes(self) -> int:
        return self._weight.nbytes + (self._bias.nbytes if self._bias is not None else 0)


class PlainLinearMethod(LinearMethod):
    """Keeps the weight unchanged."""

    name = "plain"

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return PlainLinear(weight_OI, bias_O)


class PackedLinear(Linear):
    """A weight in oneDNN's blocked layout, made once: 5-9 times faster than F.linear at batch 2-16
    (docs/guide/performance.md)."""

    # Rows that the layout is tuned for; the result is the same for any number.
    BATCH_HINT = 16

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), self.BATCH_HINT)
        self._bias = bias_O
        self._num_bytes = weight_OI.nbytes + (bias_O.nbytes if bias_O is not None else 0)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        result: Tensor = self._multiply(x_TI, self._packed, self._bias, "none", [], "")
        return result

    @property
    @override
    def num_bytes(self) -> int:
        """The blocked layout pads by at most one block a side, which is not counted."""
        return self._num_bytes


class PackedLinearMethod(LinearMethod):
    """Packs through oneDNN."""

    name = "packed"

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return PackedLinear(weight_OI, bias_O)


def cpu_linear_method(dtype: torch.dtype) -> LinearMethod:
    """Return the packing method where it works, else the plain one, which is several times slower."""
    return PackedLinearMethod() if packing_obstacle(dtype) is None else PlainLinearMethod()
