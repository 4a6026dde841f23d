"""Element types, flags and numpy's view of tensors. numpy is imported when the first one is made."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from penstock.v1 import common_pb2

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class Dtype(enum.Enum):
    """Element type of a tensor, by SAIL's name. numpy has no bfloat16: such numbers are the upper halves of float32 in
    uint16."""

    BM_FLOAT32 = common_pb2.D_TYPE_FLOAT32
    BM_FLOAT16 = common_pb2.D_TYPE_FLOAT16
    BM_BFLOAT16 = common_pb2.D_TYPE_BFLOAT16
    BM_INT8 = common_pb2.D_TYPE_INT8
    BM_INT32 = common_pb2.D_TYPE_INT32


class BmrtFlag(enum.IntFlag):
    """Flags of loading, by SAIL's names. A service shares a model's memory among all callers, without other checks."""

    BM_RUNTIME_AUTO = 0
    BM_RUNTIME_SHARE_MEM = 1
    BM_RUNTIME_CHECK_MEM = 2


# numpy's types, little-endian as on the wire.
_STORED = {
    Dtype.BM_FLOAT32: "<f4",
    Dtype.BM_FLOAT16: "<f2",
    Dtype.BM_BFLOAT16: "<u2",
    Dtype.BM_INT8: "i1",
    Dtype.BM_INT32: "<i4",
}
_FLOATS = (Dtype.BM_FLOAT32, Dtype.BM_FLOAT16, Dtype.BM_BFLOAT16)


def numpy() -> Any:
    """Return numpy. Raises ImportError naming what to install."""
    try:
        import numpy
    except ImportError:
        raise ImportError("EngineLLM needs numpy: pip install numpy") from None
    return numpy


@cache
def number_array() -> type:
    """Return the type of arrays that drivers get: numpy's own do not become numbers any more when they have a shape."""
    np = numpy()

    class OneNumber(np.ndarray):  # type: ignore[misc,name-defined]
        def __int__(self) -> int:
            return int(self.item())

        def __float__(self) -> float:
            return float(self.item())

    return OneNumber


def zeros(shape: Sequence[int], dtype: Dtype) -> Array:
    """Return an array of zeros in the storage form of `dtype`."""
    made: Array = numpy().zeros(tuple(shape), dtype=_STORED[dtype])
    return made


# Mask value for a token that a row does not see.
_HIDDEN = -10000.0


def initial(name: str, shape: Sequence[int]) -> Array | None:
    """Return the initial values of a graph's new input that make it valid; None: zeros.

    A mask sees all columns before the rows' own, and the causal ones of these; positions start after them.
    """
    np = numpy()
    made: Array
    if name == "attention_mask" and len(shape) == 4:
        rows, columns = shape[2:]
        made = np.where(np.tri(rows, columns, columns - rows, dtype=bool), 0.0, _HIDDEN).astype("f4")
        made = np.ascontiguousarray(np.broadcast_to(made, tuple(shape)))
        return made
    if name == "position_ids":
        made = np.ascontiguousarray(np.broadcast_to(np.arange(shape[-1]), tuple(shape)))
        return made
    if name in ("temperature", "top_p", "penalty"):
        made = np.ones(tuple(shape), "f4")
        return made
    return None


def stored(values: Any, dtype: Dtype) -> Array:
    """Return values in the storage form of `dtype`: contiguous, little-endian, converted if the kind of number allows.

    uint16 stands for the bits of a 16-bit float; other numbers are rounded to it. Raises TypeError for fractions in
    place of whole numbers, ValueError for whole numbers that do not fit.
    """
    np = numpy()
    array = np.asarray(values)
    wanted = np.dtype(_STORED[dtype])
    made: Array
    if dtype in _FLOATS:
        if array.dtype == np.uint16 and wanted.itemsize == 2:
            made = np.ascontiguousarray(array).astype("<u2").view(wanted).reshape(array.shape)
            return made
        if array.dtype.kind not in "fiu":
            raise TypeError(f"must hold numbers, not {array.dtype}")
        made = _bfloat16(array) if dtype is Dtype.BM_BFLOAT16 else np.ascontiguousarray(array, dtype=wanted)
        return made.reshape(array.shape)
    if array.dtype.kind not in "iu":
        raise TypeError(f"must hold whole numbers, not {array.dtype}")
    limits = np.iinfo(wanted)
    if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
        raise ValueError(f"must hold numbers from {limits.min} to {limits.max}")
    made = np.ascontiguousarray(array, dtype=wanted)
    return made.reshape(array.shape)


def element_bits(values: Any, dtype: Dtype, count: int) -> Any:
    """Return `values`, or the numbers with these bits: drivers pass any tensor's bytes as 16-bit numbers."""
    np = numpy()
    array = np.asarray(values)
    wanted = np.dtype(_STORED[dtype])
    is_bits = array.dtype == np.uint16 and wanted.itemsize > array.itemsize
    if not is_bits or array.nbytes != count * wanted.itemsize:
        return values
    return np.ascontiguousarray(array).reshape(-1).view(wanted)


def read_into(target: Array, data: Array, dtype: Dtype) -> None:
    """Write a tensor's stored elements into an array of equal size, converted to its type; bfloat16 as bits into
    uint16.

    Raises ValueError for another number of elements.
    """
    np = numpy()
    if target.size != data.size:
        raise ValueError(f"the tensor has {data.size} elements, the array {target.size}")
    if dtype is Dtype.BM_BFLOAT16 and target.dtype != np.uint16:
        data = from_bfloat16(data)
    elif dtype is Dtype.BM_FLOAT16 and target.dtype == np.uint16:
        data = data.view(np.uint16)
    np.copyto(target, data.reshape(target.shape), casting="unsafe")


def from_bfloat16(bits: Array) -> Array:
    """Return bfloat16 numbers, as uint16, in float32."""
    np = numpy()
    found: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return found


def _bfloat16(values: Any) -> Array:
    """Return numbers rounded to bfloat16, ties to even, as uint16."""
    np = numpy()
    numbers = np.ascontiguousarray(values, dtype=np.float32)
    bits = numbers.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    # The rounded bits of a NaN may be a number's.
    found: Array = np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded).reshape(np.shape(values))
    return found


def from_bytes(data: bytes, shape: Sequence[int], dtype: Dtype) -> Array:
    """Return a tensor's bytes as an array with its own memory."""
    found: Array = numpy().frombuffer(bytearray(data), dtype=_STORED[dtype]).reshape(tuple(shape))
    return found
