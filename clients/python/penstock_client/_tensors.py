"""Tensors of output positions as plain values, and tensors of requests from any library, without numpy or torch."""

from __future__ import annotations

import ctypes
import sys
from array import array
from dataclasses import dataclass
from math import exp, fsum, log, prod
from typing import Any

from penstock.v1 import common_pb2, model_pb2

from penstock_client._wrong_values import WrongType, WrongValue

# DType -> the code of array and memoryview.
_CODES: dict[int, Any] = {common_pb2.D_TYPE_FLOAT32: "f", common_pb2.D_TYPE_INT32: "i", common_pb2.D_TYPE_INT64: "q"}
# Element types of tensors in requests, by torch's and numpy's names.
_FLOATS = {
    "float32": common_pb2.D_TYPE_FLOAT32,
    "float16": common_pb2.D_TYPE_FLOAT16,
    "bfloat16": common_pb2.D_TYPE_BFLOAT16,
}
# Size of an element -> the code of an unsigned number of the same size.
_UNSIGNED = {4: "I", 2: "H"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Row-major values. `numpy.asarray(tensor.values)` and `torch.frombuffer(...)` accept `values` directly."""

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
    # Beam modes: the beam that the token was drawn from, as transformers' beam_indices.
    beam_index: int | None = None


def step_tensors(message: common_pb2.StepTensors) -> StepTensors:
    """Return the tensors of one token."""
    # Absent ones stay None.
    found: dict[str, Any] = {
        field.name: value if isinstance(value, int) else _tensor(value) for field, value in message.ListFields()
    }
    return StepTensors(**found)


def score_of(tensors: StepTensors, token_id: int, *, normalize: bool) -> float:
    """Return a token's score in one step; `normalize`: its log-probability. Raises ValueError if it is unknown."""
    if tensors.scores is None:
        raise ValueError("a token has no scores: set output_scores=True")
    scores = tensors.scores.values.tolist()
    if tensors.score_ids is None:
        place = token_id
    else:
        if normalize:
            raise ValueError("all scores are needed to normalise them: leave out scores_top_k")
        ids = tensors.score_ids.values.tolist()
        if token_id not in ids:
            raise ValueError("the token is not among the scores_top_k highest")
        place = ids.index(token_id)
    score = float(scores[place])
    if not normalize:
        return score
    highest = max(scores)
    return min(0.0, score - highest - log(fsum(exp(one - highest) for one in scores)))


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
        raise ValueError("a tensor with a shape that does not fit its data")
    flat = memoryview(values)
    return Tensor(shape, flat.cast("B").cast(code, list(shape)) if shape and len(values) else flat)


def set_rows(message: common_pb2.Tensor, values: Any) -> None:
    """Fill in a tensor (rows, columns) from a torch tensor, a numpy array, rows of numbers, or another message.

    An additional first dimension of 1 is dropped, and float64 becomes float32. Raises TypeError for values other than
    floating-point numbers, ValueError for another shape.
    """
    if isinstance(values, common_pb2.Tensor):
        message.CopyFrom(values)
        return
    make = _from_torch if hasattr(values, "data_ptr") else _from_numpy if hasattr(values, "dtype") else _from_rows
    name, shape, data = make(values)
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2:
        raise WrongValue("must have the shape (tokens, hidden size)")
    message.dtype, message.data = _FLOATS[name], data
    message.shape.extend(shape)


def weight_tensor(name: str, values: Any) -> model_pb2.WeightTensor:
    """Return a torch tensor's or numpy array's name, dtype and shape. Raises TypeError for other values."""
    if not hasattr(values, "dtype") or not hasattr(values, "shape"):
        raise WrongType("must be torch tensors or numpy arrays")
    dtype = _FLOATS.get(_name(values), common_pb2.D_TYPE_FLOAT32)
    return model_pb2.WeightTensor(name=name, dtype=dtype, shape=tuple(values.shape))


def weight_bytes(values: Any) -> bytes:
    """Return its numbers, row-major and little-endian; float64 becomes float32. Raises TypeError for whole numbers."""
    return (_from_torch if hasattr(values, "data_ptr") else _from_numpy)(values)[2]


def _from_torch(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    if not tensor.is_floating_point():
        raise WrongType("must be of floating-point numbers")
    if _name(tensor) not in _FLOATS:
        tensor = tensor.float()
    tensor = tensor.detach().cpu().contiguous()
    item = tensor.element_size()
    # torch would convert through numpy, which has no bfloat16.
    data = ctypes.string_at(tensor.data_ptr(), tensor.numel() * item)
    return _name(tensor), tuple(tensor.shape), _little_endian(data, item)


def _from_numpy(values: Any) -> tuple[str, tuple[int, ...], bytes]:
    if _name(values) not in _FLOATS:
        if values.dtype.kind != "f":
            raise WrongType("must be of floating-point numbers")
        values = values.astype("float32")
    data = values.astype(values.dtype.newbyteorder("=")).tobytes()
    return _name(values), tuple(values.shape), _little_endian(data, values.dtype.itemsize)


def _from_rows(rows: Any) -> tuple[str, tuple[int, ...], bytes]:
    rows = [list(row) for row in rows]
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise WrongValue("must have rows of the same length")
    values = array("f", [value for row in rows for value in row])
    return "float32", (len(rows), *widths), _little_endian(values.tobytes(), values.itemsize)


def _name(values: Any) -> str:
    """Return the name of the element type: torch.float32, and numpy's float32, are float32."""
    return str(getattr(values.dtype, "name", values.dtype)).removeprefix("torch.")


def _little_endian(data: bytes, item: int) -> bytes:
    if sys.byteorder == "little":
        return data
    numbers = array(_UNSIGNED[item], data)
    numbers.byteswap()
    return numbers.tobytes()
