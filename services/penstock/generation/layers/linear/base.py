"""Interfaces of linear layers: storage and product of their weights. One file per number format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from penstock.generation.core.model_config import Activation

if TYPE_CHECKING:
    from penstock.generation.layers.layer_kernels import LayerKernels
    from penstock.generation.layers.lora import SiteAdapters

# (ids) -> (ids, features) of the weight's rows.
Rows = Callable[[Tensor], Tensor]


class NotFinite(ValueError):
    """Error for a weight with NaN or infinity in or near row `row`: no scale of a quantised format holds it."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} of the weight is not finite")
        self.row = row


def check_finite(scale: Tensor) -> None:
    """Raise NotFinite when a scale is not finite; scales are (rows, any)."""
    bad = (~scale.isfinite()).flatten(1).any(dim=1).nonzero()
    if len(bad):
        raise NotFinite(int(bad[0]))


class Weight(Protocol):
    """A weight (out, in) of `dtype` that is read only on use."""

    shape: tuple[int, int]
    dtype: torch.dtype
    # Each input's share in the error of int4, float32 (in); None: all are alike.
    importance: Tensor | None

    def pieces(self) -> Iterator[Tensor]:
        """Yield the rows in order; a piece is valid until the next one."""

    def joined(self) -> Tensor:
        """Return the whole weight, in memory of its own."""


# Formats of whole numbers with a product of ours: int4's numbers mean (value - 8) * scale, those of int4-asymmetric
# value * scale + offset, with an offset for each scale. Of a weight that is quantised here int4 is int4_search.py's.
INT8, INT4, INT4_ASYMMETRIC = "int8", "int4", "int4-asymmetric"


@dataclass(frozen=True, slots=True)
class WholeRows:
    """Rows of a weight as whole numbers and scales, in one of the formats above."""

    # (rows, inputs); int8: from -128 to 127, as int8; int4: from 0 to 15, as uint8.
    values: Tensor
    # float32; int8: (rows); int4: (rows, groups), of 32 inputs each.
    scale: Tensor
    # float32 (rows, groups); int4-asymmetric only.
    offset: Tensor | None = None

    def to(self, device: torch.device) -> WholeRows:
        """Return the same on `device`."""
        offset = None if self.offset is None else self.offset.to(device)
        return WholeRows(self.values.to(device), self.scale.to(device), offset)

    def asymmetric(self) -> WholeRows:
        """Return the same numbers of an int4 form as int4-asymmetric."""
        return self if self.offset is not None else WholeRows(self.values, self.scale, self.scale * -8.0)


class WholeWeight(Protocol):
    """A weight (out, in) kept as whole numbers, for x in `dtype`; read only on use."""

    shape: tuple[int, int]
    dtype: torch.dtype
    # int8, int4 or int4-asymmetric: of all pieces.
    form: str

    def whole_pieces(self) -> Iterator[WholeRows]:
        """Yield the rows in order."""


class BlockWeight(Protocol):
    """A weight (out, in) in blocks, for x in `dtype`; read only on use."""

    shape: tuple[int, int]
    dtype: torch.dtype

    def block_parts(self) -> Sequence[tuple[str, int]]:
        """Return the type's name (gguf_blocks.BLOCK_TYPES) and the number of rows of each matrix, in their order."""

    def block_pieces(self) -> Iterator[Tensor]:
        """Yield the rows in order as (rows, bytes) of uint8, some at a time; a piece is of one matrix."""


def all_rows(weight: WholeWeight) -> WholeRows:
    """Return all rows as one piece."""
    pieces = list(weight.whole_pieces())
    offsets = [one.offset for one in pieces if one.offset is not None]
    return WholeRows(
        torch.cat([one.values for one in pieces]),
        torch.cat([one.scale for one in pieces]),
        torch.cat(offsets) if offsets else None,
    )


def dense(weight_OI: Tensor | Weight) -> Tensor:
    """Return the whole tensor."""
    return weight_OI if isinstance(weight_OI, Tensor) else weight_OI.joined()


def importance(weight_OI: Tensor | Weight) -> Tensor | None:
    """Return the importance of the inputs; None: all are alike."""
    return None if isinstance(weight_OI, Tensor) else weight_OI.importance


class Linear(ABC):
    """y = x Wᵀ + b with the weight in its method's format. Immutable after construction."""

    in_features: int
    out_features: int

    @abstractmethod
    def __call__(self, x_TI: Tensor) -> Tensor:
        """Map (rows, in) to (rows, out), in x's dtype, contiguous."""

    def as_float(self, x_TI: Tensor) -> Tensor:
        """Return the same product in float32, unrounded if the method can."""
        return self(x_TI).float()

    def adapted(self, x_TI: Tensor, adapters: SiteAdapters) -> Tensor:
        """Return the same product with the parts of the rows' adapters added."""
        return adapters.add_to(self(x_TI), x_TI)

    def adapted_as_float(self, x_TI: Tensor, adapters: SiteAdapters) -> Tensor:
        """Return `adapted` in float32, as `as_float`."""
        return adapters.add_to(self.as_float(x_TI), x_TI)

    def rows(self) -> Rows | None:
        """Return a lookup in the dense weight, for an embedding that shares it; None when the dense weight is not
        kept."""
        return None

    @property
    def quantised_as(self) -> str:
        """Format of a quantised weight: int8, int4, int4-asymmetric, or the types of its blocks; empty: it is not
        quantised."""
        return ""

    @property
    def mean_scale(self) -> float:
        """Mean magnitude of the scales of a quantised weight; 1: it is not quantised."""
        return 1.0

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of weight and bias in memory."""


class LinearMethod(ABC):
    """Turns dense weights into Linears at load time. Raises NotFinite for a weight that its format cannot hold."""

    name: str
    # True when the products of a layer's gated experts are one call (layers/experts.py).
    groups_experts = False
    # True when numbers are rounded with regard to their inputs' importance.
    weighs_inputs = False

    def linear(self, weight_OI: Tensor | Weight, bias_O: Tensor | None) -> Linear:
        """Take over `weight_OI` (out, in); the caller drops its reference, so no second copy stays in memory."""
        return self._linear(dense(weight_OI), bias_O)

    def gated(
        self,
        weight_OI: Tensor | Weight,
        bias_O: Tensor | None,
        kernels: LayerKernels,
        activation: Activation = Activation.SILU,
    ) -> Linear:
        """Return activation(first half of the outputs) * second half as one Linear with half of `weight_OI`'s
        outputs."""
        return Gated(self.linear(weight_OI, bias_O), kernels.gate(activation))

    def head(self, weight_VI: Tensor | Weight) -> Linear:
        """Return the last layer, which gives the logits; rounding hurts most there."""
        return self.linear(weight_VI, None)

    def whole(
        self,
        weight: WholeWeight,
        bias_O: Tensor | None,
        kernels: LayerKernels | None = None,
        activation: Activation = Activation.SILU,
    ) -> Linear:
        """Return a linear layer of exactly these whole numbers and scales, in their own format; `kernels`: gated, with
        half of the outputs, as the method of that name."""
        linear = self._whole(all_rows(weight), bias_O)
        return linear if kernels is None else Gated(linear, kernels.gate(activation))

    def blocks(
        self,
        weight: BlockWeight,
        bias_O: Tensor | None,
        kernels: LayerKernels | None = None,
        activation: Activation = Activation.SILU,
    ) -> Linear | None:
        """Return a linear layer of exactly these blocks, at their own size; `kernels`: gated, as `whole`. None: the
        method has no product for them."""
        return None

    @abstractmethod
    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        """Return `linear` of a weight that is a whole tensor."""

    def _whole(self, rows: WholeRows, bias_O: Tensor | None) -> Linear:
        """Return a linear layer of these whole numbers."""
        raise TypeError(f"{self.name} keeps no whole numbers")


class Gated(Linear):
    """activation(first half of a linear layer's outputs) * second half."""

    def __init__(self, linear: Linear, gate: Callable[[Tensor], Tensor]) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features // 2
        self._linear = linear
        self._gate = gate

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._gate(self._linear(x_TI))

    def adapted(self, x_TI: Tensor, adapters: SiteAdapters) -> Tensor:
        return self._gate(self._linear.adapted(x_TI, adapters))

    @property
    def quantised_as(self) -> str:
        return self._linear.quantised_as

    @property
    def mean_scale(self) -> float:
        return self._linear.mean_scale

    @property
    def num_bytes(self) -> int:
        return self._linear.num_bytes
