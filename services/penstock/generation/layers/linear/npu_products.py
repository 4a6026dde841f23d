"""int8 and int4 on an Ascend NPU: torch-npu's products, each behind a check of its documented limits.

int8 multiplies whole numbers: x is quantised row by row as it comes. int4 multiplies x as it is. Results are of x's
dtype. Schemas are those of torch-npu 2.14, which tests/data/npu_schemas.json holds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.common.errors import StartupError
from penstock.generation.attention.npu_operators import OperatorLimit
from penstock.generation.layers.linear.base import (
    INT4,
    INT4_ASYMMETRIC,
    INT8,
    Linear,
    LinearMethod,
    Weight,
    WholeRows,
    check_finite,
    dense,
)
from penstock.generation.layers.linear.int4 import quantize_groups
from penstock.generation.layers.linear.int4_search import GROUP
from penstock.generation.layers.linear.int8 import int8_numbers
from penstock.generation.rounding.rotation import halved, natural_scale, rotated_by_product, rotation_matrix

# Dtypes of x, and of the results.
DTYPES = (torch.float16, torch.bfloat16)
# Inputs, and outputs, of one product.
MOST_FEATURES = 65_535
_MOST_ROWS = 2**31 - 1
# Whole numbers of int4 in one of int32.
_PACKED = 8
# Outputs of a product where a layer has more than MOST_FEATURES.
_OUTPUTS_AT_A_TIME = 65_472
# Of bias, by x's dtype.
_INT4_BIAS = {torch.bfloat16: torch.float32, torch.float16: torch.float16}


def dynamic_quant(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as whole numbers (T, I) in int8, and the scale of each row (T) in float32. Raises OperatorLimit."""
    if x_TI.dim() != 2 or not x_TI.numel() or x_TI.dtype not in DTYPES:
        raise OperatorLimit(
            "npu_dynamic_quant",
            f"input must be (T, I), not empty, in float16 or bfloat16, found {tuple(x_TI.shape)} {x_TI.dtype}",
        )
    values, scales = torch.ops.npu.npu_dynamic_quant(x_TI)
    return values, scales


def check_int8(weight_IO: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> None:
    """Raise OperatorLimit for a weight, its scales or a bias outside npu_quant_matmul's limits."""
    operator = "npu_quant_matmul"
    if weight_IO.dim() != 2 or weight_IO.dtype is not torch.int8 or not weight_IO.is_contiguous():
        raise OperatorLimit(operator, f"x2 must be contiguous (I, O) int8, found {weight_IO.dim()}-D {weight_IO.dtype}")
    _check_sizes(operator, "x2", *weight_IO.shape)
    outputs = weight_IO.shape[1]
    if scale_O.shape != (outputs,) or scale_O.dtype is not torch.float32:
        raise OperatorLimit(
            operator, f"scale must be ({outputs},) float32, found {tuple(scale_O.shape)} {scale_O.dtype}"
        )
    if bias_O is not None and (bias_O.shape != (outputs,) or bias_O.dtype is not torch.float32):
        raise OperatorLimit(operator, f"bias must be ({outputs},) float32, found {tuple(bias_O.shape)} {bias_O.dtype}")


def quant_matmul(
    values_TI: Tensor,
    row_scale_T: Tensor,
    weight_IO: Tensor,
    scale_O: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return (values weight) * row scale * scale + bias, (T, O) in `dtype`. `check_int8` comes before it, once a
    weight. Raises OperatorLimit."""
    operator = "npu_quant_matmul"
    if values_TI.dtype is not torch.int8 or values_TI.dim() != 2 or values_TI.shape[1] != weight_IO.shape[0]:
        raise OperatorLimit(
            operator, f"x1 must be (T, {weight_IO.shape[0]}) int8, found {tuple(values_TI.shape)} {values_TI.dtype}"
        )
    if row_scale_T.shape != values_TI.shape[:1] or row_scale_T.dtype is not torch.float32:
        raise OperatorLimit(operator, f"pertoken_scale must be float32 of {len(values_TI)} rows")
    if dtype not in DTYPES:
        raise OperatorLimit(operator, f"output_dtype must be float16 or bfloat16 with pertoken_scale, found {dtype}")
    result: Tensor = torch.ops.npu.npu_quant_matmul(
        values_TI, weight_IO, scale_O, pertoken_scale=row_scale_T, bias=bias_O, output_dtype=dtype
    )
    return result


def int4_packed(values_IO: Tensor) -> Tensor:
    """Return whole numbers from -8 to 7 packed, (I, O / 8) int32. Raises OperatorLimit. Their range is looked at only
    where they are in the host's memory."""
    operator = "npu_convert_weight_to_int4pack"
    if values_IO.dim() != 2 or values_IO.dtype is not torch.int32 or not values_IO.is_contiguous():
        raise OperatorLimit(
            operator, f"weight must be contiguous 2-D int32, found {values_IO.dim()}-D {values_IO.dtype}"
        )
    if values_IO.shape[1] % _PACKED:
        raise OperatorLimit(operator, f"weight must have a multiple of {_PACKED} columns, found {values_IO.shape[1]}")
    if values_IO.device.type == "cpu" and not -8 <= int(values_IO.min()) <= int(values_IO.max()) <= 7:
        raise OperatorLimit(operator, "weight must be from -8 to 7")
    packed: Tensor = torch.ops.npu.npu_convert_weight_to_int4pack(values_IO)
    return packed


def check_int4(
    packed_IP: Tensor, scale_GO: Tensor, offset_GO: Tensor | None, bias_O: Tensor | None, group: int
) -> None:
    """Raise OperatorLimit for a weight of npu_weight_quant_batchmatmul outside its limits. `group`: inputs that share a
    scale; 0: all of them."""
    operator = "npu_weight_quant_batchmatmul"
    if packed_IP.dim() != 2 or packed_IP.dtype is not torch.int32 or not packed_IP.is_contiguous():
        raise OperatorLimit(
            operator, f"weight must be contiguous (I, O / 8) int32, found {packed_IP.dim()}-D {packed_IP.dtype}"
        )
    inputs, outputs = packed_IP.shape[0], packed_IP.shape[1] * _PACKED
    _check_sizes(operator, "weight", inputs, outputs)
    if group and (group % 32 or not 32 <= group < inputs):
        raise OperatorLimit(
            operator,
            f"antiquant_group_size must be 0, or a multiple of 32 from 32 to {inputs - 1}, one less than the inputs, "
            f"found {group}",
        )
    shape = (-(-inputs // group) if group else 1, outputs)
    if scale_GO.shape != shape or scale_GO.dtype not in DTYPES:
        raise OperatorLimit(
            operator,
            f"antiquant_scale must be {shape} float16 or bfloat16, found {tuple(scale_GO.shape)} {scale_GO.dtype}",
        )
    if offset_GO is not None and (offset_GO.shape != shape or offset_GO.dtype is not scale_GO.dtype):
        raise OperatorLimit(operator, "antiquant_offset must have antiquant_scale's shape and dtype")
    wanted = _INT4_BIAS[scale_GO.dtype]
    if bias_O is not None and (bias_O.shape != (outputs,) or bias_O.dtype is not wanted or not bias_O.is_contiguous()):
        raise OperatorLimit(
            operator,
            f"bias must be contiguous ({outputs},) {wanted} with x in {scale_GO.dtype}, found {tuple(bias_O.shape)} "
            f"{bias_O.dtype}",
        )


def weight_quant_matmul(
    x_TI: Tensor,
    packed_IP: Tensor,
    scale_GO: Tensor,
    offset_GO: Tensor | None,
    bias_O: Tensor | None,
    group: int,
) -> Tensor:
    """Return x ((weight + offset) * scale) + bias, (T, O) in x's dtype. `check_int4` comes before it, once a weight.
    Raises OperatorLimit."""
    if x_TI.dim() != 2 or x_TI.shape[1] != packed_IP.shape[0] or x_TI.dtype is not scale_GO.dtype:
        raise OperatorLimit(
            "npu_weight_quant_batchmatmul",
            f"x must be (T, {packed_IP.shape[0]}) {scale_GO.dtype}, as antiquant_scale, found {tuple(x_TI.shape)} "
            f"{x_TI.dtype}",
        )
    if not 1 <= x_TI.shape[0] <= _MOST_ROWS:
        raise OperatorLimit(
            "npu_weight_quant_batchmatmul", f"x must have 1 to {_MOST_ROWS} rows, found {x_TI.shape[0]}"
        )
    result: Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(
        x_TI, packed_IP, scale_GO, offset_GO, bias=bias_O, antiquant_group_size=group
    )
    return result


def _check_sizes(operator: str, argument: str, inputs: int, outputs: int) -> None:
    if not (1 <= inputs <= MOST_FEATURES and 1 <= outputs <= MOST_FEATURES):
        raise OperatorLimit(
            operator, f"{argument} must have 1 to {MOST_FEATURES} inputs and outputs, found {inputs} and {outputs}"
        )


def _spans(outputs: int) -> Iterator[slice]:
    """Yield the outputs of each product of a layer: all of them, if one product may have that many."""
    step = outputs if outputs <= MOST_FEATURES else _OUTPUTS_AT_A_TIME
    for first in range(0, outputs, step):
        yield slice(first, min(first + step, outputs))


class _Products(Linear):
    """Products of a layer, side by side: one, except for the head of a large vocabulary."""

    def __init__(self, outputs: int, inputs: int) -> None:
        if inputs > MOST_FEATURES:
            raise StartupError(
                f"--quantization must be none: a linear layer has {inputs} inputs, and an NPU's products of whole "
                f"numbers take {MOST_FEATURES}",
                flag="--quantization",
            )
        self.out_features, self.in_features = outputs, inputs

    @override
    def __call__(self, x_TI: Tensor) -> Tensor:
        if not x_TI.shape[0]:
            return x_TI.new_empty(0, self.out_features)
        parts = self._parts(x_TI)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    @abstractmethod
    def _parts(self, x_TI: Tensor) -> list[Tensor]:
        """Return the results of each product, (T, outputs)."""


class NPUInt8Linear(_Products):
    """A linear layer with weights of one byte each; x is quantised too, row by row. Its blocks are turned before, in
    its own dtype, which is that of the operator's input."""

    def __init__(self, weight_OI: Tensor | WholeRows, bias_O: Tensor | None) -> None:
        """Take a weight to quantise, or one that is whole numbers."""
        weight = weight_OI if isinstance(weight_OI, Tensor) else weight_OI.values
        super().__init__(*weight.shape)
        values, scale_O1, self._block = int8_numbers(weight_OI)
        # In the dtype of a dense weight, and so of x; whole numbers have none.
        self._matrix = rotation_matrix(self._block, weight.dtype, weight.device)
        # What `rotated_by_product` takes off x.
        scale = scale_O1.flatten() * halved(self._block)
        check_finite(scale.unsqueeze(1))
        bias = None if bias_O is None else bias_O.float()
        # (weight, scale, bias) of each product.
        self._own = [
            (
                values[span].to(torch.int8).t().contiguous(),
                scale[span].contiguous(),
                None if bias is None else bias[span],
            )
            for span in _spans(self.out_features)
        ]
        for own in self._own:
            check_int8(*own)

    def _parts(self, x_TI: Tensor) -> list[Tensor]:
        values, scales = dynamic_quant(rotated_by_product(x_TI, self._matrix))
        return [quant_matmul(values, scales, *own, x_TI.dtype) for own in self._own]

    @property
    @override
    def quantised_as(self) -> str:
        return INT8

    @property
    @override
    def mean_scale(self) -> float:
        mean = float(torch.cat([scale for _, scale, _ in self._own]).mean())
        return natural_scale(mean / halved(self._block), self._block)

    @property
    @override
    def num_bytes(self) -> int:
        return _num_bytes(self._own)


class NPUInt4Linear(_Products):
    """A linear layer with weights of half a byte each, and 1/16 byte for the scales; x stays as it is."""

    def __init__(self, weight_OI: Tensor | WholeRows, bias_O: Tensor | None, dtype: torch.dtype) -> None:
        """Take a weight to quantise, or one that is whole numbers. Scales and offsets are rounded to x's `dtype`."""
        offset: Tensor | None = None
        if isinstance(weight_OI, Tensor):
            super().__init__(*weight_OI.shape)
            values, scale = quantize_groups(weight_OI)
            values = values[:, : self.in_features]
        else:
            super().__init__(*weight_OI.values.shape)
            values, scale, offset = weight_OI.values.int(), weight_OI.scale, weight_OI.offset
        scale = scale.to(dtype)
        if offset is not None and not isinstance(weight_OI, Tensor):
            check_finite(offset)
            values, scale, offset = _shifted(values, weight_OI.scale, offset, dtype)
        check_finite(scale)
        self._form = INT4 if offset is None else INT4_ASYMMETRIC
        # One group is all of the inputs: the operator's groups are smaller.
        self._group = GROUP if self.in_features > GROUP else 0
        bias = None if bias_O is None else bias_O.to(_INT4_BIAS[dtype])
        # (packed weight, scale, offset, bias) of each product.
        self._own = [
            (
                int4_packed(_filled((values[span] - 8).t())),
                _filled(scale[span].t()),
                None if offset is None else _filled(offset[span].t()),
                None if bias is None else _filled(bias[span]),
            )
            for span in _spans(self.out_features)
        ]
        for own in self._own:
            check_int4(*own, self._group)

    def _parts(self, x_TI: Tensor) -> list[Tensor]:
        parts = [weight_quant_matmul(x_TI, *own, self._group) for own in self._own]
        # The last product's outputs may be filled up.
        if excess := sum(part.shape[1] for part in parts) - self.out_features:
            parts[-1] = parts[-1][:, :-excess].contiguous()
        return parts

    @property
    @override
    def quantised_as(self) -> str:
        return self._form

    @property
    @override
    def mean_scale(self) -> float:
        """Padding outputs are left out."""
        return float(torch.cat([own[1] for own in self._own], dim=1)[:, : self.out_features].float().abs().mean())

    @property
    @override
    def num_bytes(self) -> int:
        return _num_bytes(self._own)


def _filled(values_XO: Tensor) -> Tensor:
    """Return the values contiguous, with zeros after them up to a whole number of packed outputs."""
    return F.pad(values_XO, (0, -values_XO.shape[-1] % _PACKED)).contiguous()


def _shifted(
    values_OI: Tensor, scale_OG: Tensor, offset_OG: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, scales and offsets, so that (value - 8 + offset) * scale is what value * `scale` + `offset` was.

    A group without a scale has the one number of its offset.
    """
    is_constant = scale_OG == 0
    steps = offset_OG / torch.where(is_constant, 1.0, scale_OG) + 8.0
    of_constant = is_constant.repeat_interleave(GROUP, dim=1)[:, : values_OI.shape[1]]
    return (
        torch.where(of_constant, 8, values_OI),
        torch.where(is_constant, offset_OG, scale_OG).to(dtype),
        torch.where(is_constant, 1.0, steps).to(dtype),
    )


def _num_bytes(products: Sequence[tuple[Tensor | None, ...]]) -> int:
    return sum(part.nbytes for product in products for part in product if part is not None)


class NPUInt8Method(LinearMethod):
    """Quantises as it loads: no calibration."""

    name = "npu-int8"

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return NPUInt8Linear(weight_OI, bias_O)

    def _whole(self, rows: WholeRows, bias_O: Tensor | None) -> Linear:
        return NPUInt8Linear(rows, bias_O)


class NPUInt4Method(LinearMethod):
    """Quantises as it loads; the head is int8, since rounding hurts most there."""

    name = "npu-int4"

    def __init__(self, dtype: torch.dtype) -> None:
        """Make the method for x in `dtype`."""
        self._dtype = dtype

    def _linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return NPUInt4Linear(weight_OI, bias_O, self._dtype)

    def _whole(self, rows: WholeRows, bias_O: Tensor | None) -> Linear:
        return NPUInt4Linear(rows, bias_O, self._dtype)

    @override
    def head(self, weight_VI: Tensor | Weight) -> Linear:
        return NPUInt8Linear(dense(weight_VI), None)
