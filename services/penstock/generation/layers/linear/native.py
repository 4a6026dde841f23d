"""Linear layers on the C++ kernels (csrc/linear): float32, bfloat16, int8 and int4, all in panels of 32 outputs.

A row's result has the same bits with any rows beside it and any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.generation.core.model_config import Activation
from penstock.generation.layers.linear import INT8_GROUPS
from penstock.generation.layers.linear.base import (
    INT4,
    INT4_ASYMMETRIC,
    INT8,
    BlockWeight,
    Linear,
    LinearMethod,
    NotFinite,
    Rows,
    Weight,
    WholeRows,
    WholeWeight,
    importance,
)
from penstock.generation.layers.linear.compact import CompactPacking
from penstock.generation.layers.linear.gguf_blocks import block_table, fill_blocks, table_bytes
from penstock.generation.layers.linear.int8_groups import TurnedWeight, has_groups, mean_scale_of_groups
from penstock.generation.rounding.rotation import natural_scale, rotation_block

if TYPE_CHECKING:
    from penstock.generation.host.arena import Arena
    from penstock.generation.layers.layer_kernels import LayerKernels
    from penstock.generation.layers.lora import SiteAdapters

# Version of the meaning of a packed weight's bytes, for files that store them. Raise it with every change of the layout
# in csrc/linear/linear.h, of the quantisation in csrc/linear/pack.cpp, or of `part_sizes`. A test checks that.
LAYOUT_VERSION = 4
# Older versions with the same bytes, by --quantization.
SAME_BYTES = {"none": (2, 3), "int8": (3,)}
PANEL = 32
# Inputs that share a scale in int4.
GROUP = 32
_SLAB_BYTES = 64 << 20


class Format(IntEnum):
    """Number formats, as numbered in csrc/linear/linear.h."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3
    # INT8 of weights and rows; their blocks are turned before they are rounded (rounding/rotation.py).
    ROTATED_INT8 = 4
    # The blocks of GGUF's types (gguf_blocks.py); never of weights that are quantised here.
    GGUF = 5
    # GGUF's Q8_0 of weights with turned blocks, as their rows have (int8_groups.py).
    TURNED_GROUPS = 6


_INT8_FORMATS = (Format.INT8, Format.ROTATED_INT8)


def formats(dtype: torch.dtype, quantization: str) -> tuple[Format, Format]:
    """Return the formats of the layers and of the head: bfloat16 or float32 as `dtype`, or as `quantization` says."""
    if quantization == "none":
        dense = Format.BF16 if dtype is torch.bfloat16 else Format.F32
        return dense, dense
    if quantization == INT8_GROUPS:
        return Format.TURNED_GROUPS, Format.TURNED_GROUPS
    return Format.ROTATED_INT8 if quantization == "int8" else Format.INT4, Format.ROTATED_INT8


def can_read(layout_version: str, quantization: str) -> bool:
    """True when packed weights of that version have the same meaning here."""
    return layout_version in map(str, (LAYOUT_VERSION, *SAME_BYTES.get(quantization, ())))


class Slabs:
    """Memory for packed weights in large pages, many of them in one piece: 64-byte aligned, never freed singly."""

    def __init__(self, arena: Arena | None = None) -> None:
        """Take memory from `arena` until it is used up."""
        self._arena = arena
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return (num_bytes,) uint8, not initialised."""
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
class PackedWeight:
    """A weight in the kernels' format, and facts of its dense form. The tensors are those of `part_sizes`."""

    # Outputs and inputs of the dense weight; gated: both halves of the outputs.
    shape: tuple[int, int]
    # Dtype of the dense weight, and so of x.
    dtype: torch.dtype
    format: Format
    gated: bool
    weight: Tensor
    bias: Tensor | None = None
    # int8: one per output; int4: one per group and output, in bytes with a zero (csrc/linear/linear.h's byte_scales),
    # or in float32 where whole numbers came with theirs.
    scale: Tensor | None = None
    # int8: each output's sum of weights.
    sum: Tensor | None = None
    # int4-asymmetric: the offset of every number of a group, one per group and output.
    offset: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors of the format, in the order of `part_sizes`."""
        every = {
            "weight": self.weight,
            "bias": self.bias,
            "scale": self.scale,
            "sum": self.sum,
            "offset": self.offset,
        }
        return {name: tensor for name, tensor in every.items() if tensor is not None}


def part_sizes(
    shape: tuple[int, int], format: Format, *, gated: bool, has_bias: bool, kept: str = ""
) -> dict[str, tuple[torch.dtype, int]]:
    """Return dtype and number of elements of each tensor of a packed (outputs, inputs) weight. `kept`: the form of
    whole numbers that it keeps, with their scales; empty: it is quantised here."""
    format = kept_format(format, kept, shape[1])
    outputs, inputs = shape
    panels = _num_panels(outputs, gated=gated)
    if format is Format.TURNED_GROUPS:
        num_bytes = table_bytes(block_table(TurnedWeight.parts(outputs), inputs, gated=gated))
    else:
        num_bytes = int(torch.ops.penstock.packed_size(outputs, inputs, int(format), gated))
    sizes = {"weight": (torch.uint8, num_bytes)}
    if has_bias:
        sizes["bias"] = (torch.float32, panels * PANEL)
    if format in _INT8_FORMATS:
        sizes |= {"scale": (torch.float32, panels * PANEL), "sum": (torch.int32, panels * PANEL)}
    elif format is Format.INT4:
        groups = -(-inputs // GROUP)
        sizes["scale"] = (
            (torch.float32, panels * groups * PANEL) if kept else (torch.uint8, byte_scales(panels, groups))
        )
        if kept == INT4_ASYMMETRIC:
            sizes["offset"] = sizes["scale"]
    return sizes


def byte_scales(panels: int, groups: int) -> int:
    """Return the bytes of the scales of int4 that is quantised here, as csrc/linear/linear.h has them."""
    return panels * (1 + groups) * 2 * PANEL


def unpacked_scales(packed: PackedWeight) -> Tensor:
    """Return the scales of such a weight as floats, (panels, groups, 32)."""
    assert packed.scale is not None
    lines = packed.scale.view(-1, 1 + -(-packed.shape[1] // GROUP), 2 * PANEL)
    units = lines[:, :1].contiguous().view(torch.bfloat16)
    return lines[:, 1:, :PANEL].float() * units.float()


def kept_format(format: Format, kept: str, inputs: int) -> Format:
    """Return the format of a weight in a model of `format`: whole numbers that it keeps are not turned, and inputs that
    are no whole groups have a scale a row."""
    if format is Format.TURNED_GROUPS and not has_groups(inputs):
        format = Format.ROTATED_INT8
    return Format.INT8 if format in (Format.ROTATED_INT8, Format.TURNED_GROUPS) and kept else format


class NativeLinear(Linear):
    """A linear layer for x in bfloat16 or float32; for int8 and int4 every row of x is quantised too, by itself."""

    def __init__(
        self, packed: PackedWeight, activation: Activation = Activation.SILU, block_types: Sequence[str] = ()
    ) -> None:
        """Take a weight, the function that gates it where it is gated, and the names of the types of its blocks."""
        outputs, self.in_features = packed.shape
        self.out_features = outputs // 2 if packed.gated else outputs
        self.packed = packed
        self._block_types = block_types
        # csrc/linear/linear.h: 0 is no gate.
        self.gate = int(activation) if packed.gated else 0
        multiply = partial(
            torch.ops.penstock.linear.default,
            weight=packed.weight,
            format=int(packed.format),
            width=self.out_features,
            bias=packed.bias,
            column_scale=packed.scale,
            column_sum=packed.sum,
            column_offset=packed.offset,
            gate=self.gate,
        )
        self._multiply = partial(multiply, as_float=False)
        self._multiply_as_float = partial(multiply, as_float=True)

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        result: Tensor = self._multiply(x_TI)
        return result

    @override
    def as_float(self, x_TI: Tensor) -> Tensor:
        """Sums that were never rounded to bfloat16."""
        result: Tensor = self._multiply_as_float(x_TI)
        return result

    @override
    def adapted(self, x_TI: Tensor, adapters: SiteAdapters) -> Tensor:
        """The kernel adds them to its sums, before they are rounded."""
        return self._adapted(x_TI, adapters, as_float=False)

    @override
    def adapted_as_float(self, x_TI: Tensor, adapters: SiteAdapters) -> Tensor:
        return self._adapted(x_TI, adapters, as_float=True)

    def _adapted(self, x_TI: Tensor, adapters: SiteAdapters, *, as_float: bool) -> Tensor:
        packed = self.packed
        result: Tensor = adapters.batch.native.linear(
            adapters.site,
            x_TI,
            packed.weight,
            int(packed.format),
            self.out_features,
            packed.bias,
            packed.scale,
            packed.sum,
            packed.offset,
            self.gate,
            as_float,
        )
        return result

    @override
    def rows(self) -> Rows | None:
        """Int8 and int4 do not keep the weight; blocks have the numbers of the file."""
        if self.packed.gated or self.format not in (Format.F32, Format.BF16, Format.GGUF):
            return None
        is_bf16 = self.packed.dtype is torch.bfloat16
        operators = torch.ops.penstock
        lookup = (operators.block_rows if self.format is Format.GGUF else operators.packed_rows).default
        weight, inputs, outputs = self.packed.weight, self.in_features, self.out_features
        return lambda ids_T: lookup(weight, ids_T, inputs, outputs, is_bf16)

    @property
    def format(self) -> Format:
        """Number format of the weight."""
        return self.packed.format

    @property
    @override
    def quantised_as(self) -> str:
        if self.packed.offset is not None:
            return INT4_ASYMMETRIC
        if self.format is Format.TURNED_GROUPS:
            return INT8_GROUPS
        if self.format is Format.GGUF:
            return "+".join(name.lower() for name in self._block_types)
        if self.format in _INT8_FORMATS:
            return INT8
        return INT4 if self.format is Format.INT4 else ""

    @property
    @override
    def mean_scale(self) -> float:
        """Padding outputs have no scale."""
        if self.format is Format.TURNED_GROUPS:
            return mean_scale_of_groups(self.packed.weight, self.in_features)
        scale = self.packed.scale
        if scale is None:
            return 1.0
        if scale.dtype is torch.uint8:
            scale = unpacked_scales(self.packed)
        block = rotation_block(self.in_features) if self.format is Format.ROTATED_INT8 else 1
        return natural_scale(float(scale[scale != 0].abs().float().mean()), block)

    @property
    @override
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.packed.parts().values())


class NativeLinearMethod(LinearMethod):
    """Packs for the C++ kernels, which must be loaded."""

    groups_experts = True

    def __init__(
        self, format: Format, head: Format | None = None, *, arena: Arena | None = None, compact: bool = False
    ) -> None:
        """Take the format of the layers, `head` for another one of the last layer, and `arena` for the weights' memory
        until it is used up. `compact`: weights in bfloat16 take fewer bytes (compact.py)."""
        self.name = f"native {format.name.lower()}"
        self.weighs_inputs = format is Format.INT4
        self._format = format
        self._head = format if head is None else head
        self._slabs = Slabs(arena)
        self._packing = CompactPacking() if compact else None

    @override
    def linear(self, weight_OI: Tensor | Weight, bias_O: Tensor | None) -> Linear:
        """Packs the weight as it is read."""
        return NativeLinear(self._packed(weight_OI, bias_O, self._format, gated=False))

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return self.linear(weight_OI, bias_O)

    @override
    def gated(
        self,
        weight_OI: Tensor | Weight,
        bias_O: Tensor | None,
        kernels: LayerKernels,
        activation: Activation = Activation.SILU,
    ) -> Linear:
        """The halves are combined before anything is written."""
        return NativeLinear(self._packed(weight_OI, bias_O, self._format, gated=True), activation)

    @override
    def head(self, weight_VI: Tensor | Weight) -> Linear:
        return NativeLinear(self._packed(weight_VI, None, self._head, gated=False))

    def _packed(
        self, weight_OI: Tensor | Weight, bias_O: Tensor | None, format: Format, *, gated: bool
    ) -> PackedWeight:
        return _pack(weight_OI, bias_O, format, self._slabs, gated=gated, packing=self._packing)

    @override
    def whole(
        self,
        weight: WholeWeight,
        bias_O: Tensor | None,
        kernels: LayerKernels | None = None,
        activation: Activation = Activation.SILU,
    ) -> Linear:
        """The kernels' scales are float32, so nothing is rounded."""
        packed = _pack_whole(weight, bias_O, self._slabs, gated=kernels is not None)
        return NativeLinear(packed, activation)

    @override
    def blocks(
        self,
        weight: BlockWeight,
        bias_O: Tensor | None,
        kernels: LayerKernels | None = None,
        activation: Activation = Activation.SILU,
    ) -> Linear | None:
        packed = _pack_blocks(weight, bias_O, self._slabs, gated=kernels is not None)
        types = tuple(dict.fromkeys(name for name, _ in weight.block_parts()))
        return None if packed is None else NativeLinear(packed, activation, types)


def _pack(
    weight_OI: Tensor | Weight,
    bias_O: Tensor | None,
    format: Format,
    slabs: Slabs,
    *,
    gated: bool,
    packing: CompactPacking | None,
) -> PackedWeight:
    outputs, inputs = weight_OI.shape
    format = kept_format(format, "", inputs)
    if format is Format.TURNED_GROUPS:
        packed = _pack_blocks(TurnedWeight(weight_OI), bias_O, slabs, gated=gated, format=format)
        assert packed is not None, "there is one type of blocks"
        return packed
    sizes = part_sizes((outputs, inputs), format, gated=gated, has_bias=bias_O is not None)
    if format is not Format.BF16:
        packing = None
    weight = (slabs.take if packing is None else packing.room)(sizes["weight"][1])
    scale, sums = (
        torch.empty(count, dtype=dtype)
        for dtype, count in (sizes.get("scale", (torch.float32, 0)), sizes.get("sum", (torch.int32, 0)))
    )
    first = 0
    of_inputs = importance(weight_OI)
    for piece in [weight_OI] if isinstance(weight_OI, Tensor) else weight_OI.pieces():
        rows = piece.contiguous()
        bad = torch.ops.penstock.pack_rows(rows, first, outputs, weight, scale, sums, int(format), gated, of_inputs)
        if bad >= 0:
            raise NotFinite(first + bad)
        first += piece.shape[0]
    if packing is not None:
        weight = packing.finish(weight, inputs, slabs.take)
    return PackedWeight(
        (outputs, inputs),
        weight_OI.dtype,
        format,
        gated,
        weight,
        None if bias_O is None else _in_panels(bias_O.float(), gated=gated),
        scale if "scale" in sizes else None,
        sums if "sum" in sizes else None,
    )


def _pack_whole(weight: WholeWeight, bias_O: Tensor | None, slabs: Slabs, *, gated: bool) -> PackedWeight:
    """Write whole numbers to the places where `pack_rows` of the kernels writes its rounded numbers."""
    outputs, inputs = weight.shape
    format = Format.INT8 if weight.form == INT8 else Format.INT4
    sizes = part_sizes((outputs, inputs), format, gated=gated, has_bias=bias_O is not None, kept=weight.form)
    small = ("scale", "sum", "offset")
    parts = {name: torch.zeros(count, dtype=kind) for name, (kind, count) in sizes.items() if name in small}
    memory = slabs.take(sizes["weight"][1]).zero_()
    panels, width = _num_panels(outputs, gated=gated), PANEL // 2 if gated else PANEL
    # A gated panel has rows of the first half of the outputs, and then those of the other half.
    words = memory.view(torch.int32).view(panels, -1, PANEL // width, width)
    places = {name: part.view(panels, -1, PANEL // width, width) for name, part in parts.items()}
    last = outputs // 2 if gated else outputs
    first = 0
    for piece in weight.whole_pieces():
        found = {"words": _int8_words(piece) if format is Format.INT8 else _int4_words(piece)}
        found["scale"] = piece.scale.view(len(piece.scale), -1)
        if piece.offset is not None:
            found["offset"] = piece.offset
        for numbers in (found["scale"], found.get("offset", found["scale"])):
            if len(bad := (~numbers.isfinite()).any(1).nonzero()):
                raise NotFinite(first + int(bad[0]))
        if format is Format.INT8:
            found["sum"] = piece.values.sum(1, dtype=torch.int32)[:, None]
        middle = min(max(last - first, 0), len(piece.values)) if gated else len(piece.values)
        for name, rows in found.items():
            target = words if name == "words" else places[name]
            _put(target[:, :, 0], first, rows[:middle])
            if middle < len(rows):
                _put(target[:, :, 1], first + middle - last, rows[middle:])
        first += len(piece.values)
    bias = None if bias_O is None else _in_panels(bias_O.float(), gated=gated)
    return PackedWeight((outputs, inputs), weight.dtype, format, gated, memory, bias, **parts)


def _pack_blocks(
    weight: BlockWeight, bias_O: Tensor | None, slabs: Slabs, *, gated: bool, format: Format = Format.GGUF
) -> PackedWeight | None:
    """Return a weight in its own blocks; None: two types would share a panel."""
    table = block_table(weight.block_parts(), weight.shape[1], gated=gated)
    if table is None:
        return None
    memory = slabs.take(table_bytes(table))
    if format is Format.TURNED_GROUPS:
        # Places of outputs that there are not: files of one checkpoint have the same bytes.
        memory.zero_()
    fill_blocks(memory, table, weight, gated=gated)
    bias = None if bias_O is None else _in_panels(bias_O.float(), gated=gated)
    return PackedWeight(weight.shape, weight.dtype, format, gated, memory, bias)


def _int8_words(piece: WholeRows) -> Tensor:
    """Return rows of granules (rows, granules) in int32."""
    return F.pad(piece.values, (0, -piece.values.shape[1] % 4)).contiguous().view(torch.int32)


def _int4_words(piece: WholeRows) -> Tensor:
    """Return rows of granules (rows, granules) in int32: of each 8 numbers the first four are the low halves."""
    values = F.pad(piece.values, (0, -piece.values.shape[1] % GROUP), value=8)
    # Each holds four numbers of at most 15.
    fours = values.contiguous().view(torch.int32)
    return fours[:, ::2] | fours[:, 1::2] << 4


def _put(target: Tensor, first: int, rows: Tensor) -> None:
    """Copy (rows, X) to (panels, X, width), from row `first` on: whole panels at once where they begin with one."""
    width, count = target.shape[2], len(rows)
    whole = 0 if first % width else count // width * width
    panel = first // width
    if whole:
        target[panel : panel + whole // width] = rows[:whole].view(-1, width, rows.shape[1]).transpose(1, 2)
    if whole < count:
        left = torch.arange(first + whole, first + count)
        target[left // width, :, left % width] = rows[whole:]


def _num_panels(outputs: int, *, gated: bool) -> int:
    return -(-outputs // 2 // (PANEL // 2)) if gated else -(-outputs // PANEL)


def _in_panels(bias_O: Tensor, *, gated: bool) -> Tensor:
    """Return the bias in the order of the panels' outputs, padded with zeros."""
    if not gated:
        return F.pad(bias_O, (0, -bias_O.shape[0] % PANEL))
    half = PANEL // 2
    gate, up = (F.pad(part, (0, -part.shape[0] % half)).view(-1, half) for part in bias_O.chunk(2))
    return torch.cat([gate, up], dim=1).flatten()
