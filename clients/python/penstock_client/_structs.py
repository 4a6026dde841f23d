"""JSON objects of a request as google.protobuf.Struct, within the depth that every protobuf reader takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import struct_pb2
from penstock.common.errors import InvalidArgument

# An object within an object takes three levels of a message, and readers refuse a message of more than a hundred.
MOST_DEPTH = 32


def set_struct(struct: struct_pb2.Struct, value: Any, where: str) -> None:
    """Put an object into a message. Raises InvalidArgument naming `where`."""
    if not isinstance(value, Mapping):
        raise InvalidArgument(where, "must be an object")
    if _is_deeper(value, MOST_DEPTH):
        raise InvalidArgument(where, f"must not be nested more than {MOST_DEPTH} deep", reason="TOO_DEEP")
    try:
        struct.update(value)
    # Their words may repeat the value.
    except (TypeError, ValueError, OverflowError, AttributeError):
        raise InvalidArgument(where, "has a value that is not JSON's, or out of range") from None


def _is_deeper(value: Any, most: int) -> bool:
    """True for lists and objects within each other of more than `most` levels."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else None
    return inner is not None and (not most or any(_is_deeper(each, most - 1) for each in inner))
