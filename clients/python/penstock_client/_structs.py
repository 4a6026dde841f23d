"""JSON objects of a request as google.protobuf.Struct, within the depth that every protobuf parser accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import struct_pb2
from penstock.common.errors import InvalidArgument

# A nested object takes three levels of a message, and parsers refuse a message with more than a hundred.
MOST_DEPTH = 32
# Values of all objects of a request, without names: each takes microseconds here, and again at the server.
MOST_VALUES = 1 << 14


class Structs:
    """Writer of the objects of one request, which share one limit."""

    def __init__(self) -> None:
        """Make it for a new request."""
        self._left = MOST_VALUES

    def set(self, struct: struct_pb2.Struct, value: Any, where: str) -> None:
        """Put an object into a message. Raises InvalidArgument naming `where`."""
        if not isinstance(value, Mapping):
            raise InvalidArgument(where, "must be an object")
        self._count(value, MOST_DEPTH, where)
        try:
            struct.update(value)
        # Their texts may repeat the value.
        except (TypeError, ValueError, OverflowError, AttributeError):
            raise InvalidArgument(where, "has a value that is not JSON's, or out of range") from None

    def _count(self, value: Any, deeper: int, where: str) -> None:
        """Count a value and those in it; `deeper` further levels are allowed."""
        if not isinstance(value, Mapping | list | tuple):
            return
        if not deeper:
            raise InvalidArgument(where, f"must not be nested more than {MOST_DEPTH} deep", reason="TOO_DEEP")
        self._left -= len(value)
        if self._left < 0:
            raise InvalidArgument(
                where,
                f"must not have more than {MOST_VALUES} values, all tools and variables together",
                reason="TOO_MANY",
            )
        for each in value.values() if isinstance(value, Mapping) else value:
            self._count(each, deeper - 1, where)
