"""Names of number formats and the proto's DType: its values are those names in capitals."""

from __future__ import annotations

from penstock.common.dtypes import BY_NAME, dtype_name
from penstock.v1 import common_pb2

_PREFIX = "D_TYPE_"
_VALUES = frozenset(common_pb2.DType.keys())
_NUMBERS = {name: common_pb2.DType.Value(value) for name in BY_NAME if (value := f"{_PREFIX}{name.upper()}") in _VALUES}
_NAMES = {number: name for name, number in _NUMBERS.items()}


def from_dtype(name: str) -> common_pb2.DType.ValueType:
    """Return `torch.bfloat16` or `bfloat16` as DType; unknown names are UNSPECIFIED."""
    return _NUMBERS.get(dtype_name(name), common_pb2.D_TYPE_UNSPECIFIED)


def to_dtype(number: common_pb2.DType.ValueType) -> str:
    """Return a DType's name; empty for UNSPECIFIED and for numbers that no value has."""
    return _NAMES.get(number, "")
