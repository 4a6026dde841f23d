"""Tensors of output positions as plain values, without numpy or torch."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from math import prod
from typing import Any

from penstock.v1 import common_pb2

# DType -> the code of array and memoryview.
_CODES: dict[int, Any] = {common_pb2.D_TYPE_FLOAT32: "f", common_pb2.D_TYPE_INT32: "i", common_pb2.D_TYPE_INT64: "q"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Row-major values. `numpy.asarray(tensor.values)` and `torch.frombuffer(...)` take `values` as they are."""

    shape: tuple[int, ...]
    # A buffer of the shape; `values[i, j]` and `values.tolist()` work.
    values: memoryview


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Tensors of one output token; None: not asked for. See docs/guide/outputs.md for shapes and meanings."""

    scores: Tensor | None = None
    score_ids: Tensor | None = None
    logits: Tensor | None = None
    logit_ids: Tensor | None = None
    hidden_states: Tensor | None = None
    attentions: Tensor | None = None


def step_tensors(message: common_pb2.StepTensors) -> StepTensors:
    """Return the tensors of one token."""
    return StepTensors(
        **{field.name: _tensor(value) for field, value in message.ListFields()}  # absent ones stay None
    )


def _tensor(message: common_pb2.Tensor) -> Tensor:
    """Return a message's tensor. Raises ValueError for an element type that this release does not send."""
    code = _CODES.get(message.dtype)
    if code is None:
        raise ValueError("a tensor of an unknown element type")
    values = array(code)
    values.frombytes(message.data)
    if sys.byteorder == "big":
        values.byteswap()
    shape = tuple(message.shape)
    if prod(shape) != len(values):
        raise ValueError("a tensor whose shape is not that of its data")
    flat = memoryview(values)
    return Tensor(shape, flat.cast("B").cast(code, list(shape)) if shape and len(values) else flat)
