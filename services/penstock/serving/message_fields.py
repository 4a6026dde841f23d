"""Count of a message's fields on the wire, before protobuf makes objects of them.

An empty entry of a list takes two bytes on the wire, a hundred in memory, and microseconds in every loop over it: a few
MiB, or a few compressed kB, would hold up all streams of a process for minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, TypeVar

from google.protobuf.descriptor import Descriptor

from penstock.common.errors import InvalidArgument

MessageT = TypeVar("MessageT")
# Names of a message's fields and the types of those that are messages, by number.
_Fields: TypeAlias = "dict[int, tuple[str, Descriptor | None]]"
# Bytes of the smallest field: its tag, and a value or a length.
_LEAST_BYTES = 2
# Levels with separate names of fields: names of deeper ones would take the square of the depth.
_NAMED_LEVELS = 8
_VARINT, _FIXED64, _LENGTH, _GROUP, _GROUP_END, _FIXED32 = range(6)


def bounded(parse: Callable[[bytes], MessageT], limit: int) -> Callable[[bytes], MessageT]:
    """Return `parse`, a message type's FromString, for messages of at most `limit` fields. It raises InvalidArgument.

    Any other function is returned unchanged. A message too short for that many fields costs one comparison.
    """
    descriptor: Any = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)
    if not isinstance(descriptor, Descriptor):
        return parse
    shortest = limit * _LEAST_BYTES

    def parse_bounded(data: bytes) -> MessageT:
        if len(data) > shortest:
            check_fields(data, descriptor, limit)
        return parse(data)

    return parse_bounded


def check_fields(data: bytes, descriptor: Descriptor, limit: int) -> None:
    """Refuse a message with more than `limit` fields, nested ones included.

    It takes up to 0.3 us a field, and visits at most `limit`. A list of packed numbers is one field. Bytes that are not
    a message pass: the parser refuses them. Raises InvalidArgument naming the field that holds the most.
    """
    fields = _fields(descriptor)
    at, end, path = 0, len(data), ""
    outer: list[tuple[int, _Fields, str]] = []
    counts: dict[str, int] = {}
    try:
        for _ in range(limit):
            while at >= end:
                if not outer:
                    return
                end, fields, path = outer.pop()
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == _LENGTH:
                size, at = _varint(data, at)
                name, message = fields.get(tag >> 3, ("", None))
                if not name or len(outer) >= _NAMED_LEVELS:
                    name = path
                elif path:
                    name = f"{path}.{name}"
                counts[name] = counts.get(name, 0) + 1
                if message is None or not size:
                    at += size
                else:
                    outer.append((end, fields, path))
                    end, fields, path = at + size, _fields(message), name
            elif kind == _VARINT:
                _, at = _varint(data, at)
            elif kind == _FIXED64:
                at += 8
            elif kind == _FIXED32:
                at += 4
            elif kind not in (_GROUP, _GROUP_END):
                return
    except IndexError:
        return
    if at < end or any(at < whole for whole, _, _ in outer):
        largest = max(counts, key=lambda name: counts[name], default="") or "request"
        raise InvalidArgument(
            largest, f"the message has more than the {limit} fields that --max-message-fields allows", reason="TOO_MANY"
        )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, and its end. Raises IndexError."""
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    shift = 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


@cache
def _fields(descriptor: Descriptor) -> _Fields:
    return {field.number: (field.name, field.message_type) for field in descriptor.fields}
