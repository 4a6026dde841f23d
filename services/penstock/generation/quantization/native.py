"""Linear layers on the C++ kernels: float32, bfloat16, int8 and int4, all in panels of 32 outputs (csrc/linear.h).

A row's result is the same bits whatever rows are beside it and however many threads work.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.generation.quantization.base import Linear, LinearMethod, NotFinite, Rows, Weight

if TYPE_CHECKING:
    from penstock.generation.devices.arena import Arena
    from penstock.generation.models.kernels import LayerKernels

PANEL = 32
# Inputs that share a scale in int4.
GROUP = 32
_SLAB_BYTES = 64 << 20


class Format(IntEnum):
    """csrc/linear.h's numbers."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3


class Slabs:
    """Memory for packed weights in large pages, many of them in one piece: 64-byte aligned, never given back singly."""

    def __init__(self, arena: Arena | None = None) -> None:
        """From `arena` while it lasts."""
        self._arena = arena
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """(num_bytes,) uint8, not initialised."""
        memory = None if self._arena is None else self._arena.take(num_bytes)
        if memory:
            return torch.frombuffer(memory, dtype=torch.uint8)
        size = -(-num_bytes // 64) * 64
        if size > self._left.numel():
            slab = torch.empty(max(size, _SLAB_BYTES), dtype=torch.uint8)
            torch.ops.penstock.advise_large_pages(slab)
            if size >= _SLAB_BYTES:
                return slab[:num_bytes]
            self._left = slab
        taken, self._left = self._left[:num_bytes], self._left[size:]
        return taken


@dataclass(frozen=True, slots=True)
class _Packed:
    weight: Tensor
    # int8: one per output; int4: one per group and output.
    scale: Tensor | None
    # int8: each output's sum of weights.
    sum: Tensor | None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.weight, self.scale, self.sum) if tensor is not None)


class NativeLinear(Linear):
    """x in bfloat16 or float32; for int8 and int4 every row of x is quantised too, by itself."""

    def __init__(
        self, weight_OI: Tensor | Weight, bias_O: Tensor | None, format: Format, slabs: Slabs, *, gated: bool
    ) -> None:
        outputs, self.in_features = weight_OI.shape
        self.out_features = outputs // 2 if gated else outputs
        packed = _pack(weight_OI, format, slabs, gated=gated)
        self._format = format
        self._packed = packed
        self._dtype = weight_OI.dtype
        self._bias = None if bias_O is None else _in_panels(bias_O.float(), gated=gated)
        multiply = partial(
            torch.ops.penstock.linear.default,
            weight=packed.weight,
            format=int(format),
            width=self.out_features,
            bias=self._bias,
            column_scale=packed.scale,
            column_sum=packed.sum,
            gated=gated,
        )
        self._multiply = partial(multiply, as_float=False)
        self._multiply_as_float = partial(multiply, as_float=True)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See Linear."""
        result: Tensor = self._multiply(x_TI)
        return result

    def as_float(self, x_TI: Tensor) -> Tensor:
        """See Linear: never rounded to bfloat16."""
        result: Tensor = self._multiply_as_float(x_TI)
        return result

    def rows(self) -> Rows | None:
        """See Linear: int8 and int4 do not keep the weight."""
        if self._format in (Format.INT8, Format.INT4):
            return None
        is_bf16 = self._dtype is torch.bfloat16
        lookup = torch.ops.penstock.packed_rows.default
        weight, inputs, outputs = self._packed.weight, self.in_features, self.out_features
        return lambda ids_T: lookup(weight, ids_T, inputs, outputs, is_bf16)

    @property
    def format(self) -> Format:
        """Of the weight."""
        return self._format

    def tensors(self) -> list[Tensor | None]:
        """Weight, bias, scale and sum, as csrc/ops_decoder.cpp takes them."""
        return [self._packed.weight, self._bias, self._packed.scale, self._packed.sum]

    @property
    def num_bytes(self) -> int:
        """See Linear."""
        return self._packed.num_bytes + (0 if self._bias is None else self._bias.nbytes)


class NativeLinearMethod(LinearMethod):
    """Packs for the C++ kernels, which must be loaded."""

    def __init__(self, format: Format, head: Format | None = None, *, arena: Arena | None = None) -> None:
        """`head`: the format of the last layer, where it is another; `arena`: where weights go while it lasts."""
        self.name = f"native {format.name.lower()}"
        self._format = format
        self._head = format if head is None else head
        self._slabs = Slabs(arena)

    def linear(self, weight_OI: Tensor | Weight, bias_O: Tensor | None) -> Linear:
        """See LinearMethod: packed as it is read."""
        return NativeLinear(weight_OI, bias_O, self._format, self._slabs, gated=False)

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return self.linear(weight_OI, bias_O)

    def gated(self, weight_OI: Tensor | Weight, bias_O: Tensor | None, kernels: LayerKernels) -> Linear:
        """See LinearMethod: the halves meet before anything is written."""
        return NativeLinear(weight_OI, bias_O, self._format, self._slabs, gated=True)

    def head(self, weight_VI: Tensor | Weight) -> Linear:
        """See LinearMethod."""
        return NativeLinear(weight_VI, None, self._head, self._slabs, gated=False)


def _pack(weight_OI: Tensor | Weight, format: Format, slabs: Slabs, *, gated: bool) -> _Packed:
    outputs, inputs = weight_OI.shape
    weight = slabs.take(torch.ops.penstock.packed_size(outputs, inputs, int(format), gated))
    panels = -(-outputs // PANEL) if not gated else -(-outputs // 2 // (PANEL // 2))
    groups = -(-inputs // GROUP)
    scales = {Format.INT8: panels * PANEL, Format.INT4: panels * groups * PANEL}.get(format, 0)
    scale = torch.empty(scales, dtype=torch.float32)
    sums = torch.empty(scales if format is Format.INT8 else 0, dtype=torch.int32)
    first = 0
    for piece in [weight_OI] if isinstance(weight_OI, Tensor) else weight_OI.pieces():
        bad = torch.ops.penstock.pack_rows(piece.contiguous(), first, outputs, weight, scale, sums, int(format), gated)
        if bad >= 0:
            raise NotFinite(first + bad)
        first += piece.shape[0]
    return _Packed(weight, scale if scales else None, sums if format is Format.INT8 else None)


def _in_panels(bias_O: Tensor, *, gated: bool) -> Tensor:
    """In the order of the panels' outputs, padded with zeros."""
    if not gated:
        return F.pad(bias_O, (0, -bias_O.shape[0] % PANEL))
    half = PANEL // 2
    gate, up = (F.pad(part, (0, -part.shape[0] % half)).view(-1, half) for part in bias_O.chunk(2))
    return torch.cat([gate, up], dim=1).flatten()
