"""The few bytes of protobuf's wire format that benchmark backends put together and take apart by hand."""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def varint(value: int) -> bytes:
    """A non-negative number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def number(field: int, value: int) -> bytes:
    """An integer or a boolean field."""
    return varint(field << 3 | _VARINT) + varint(value)


def block(field: int, payload: bytes) -> bytes:
    """A field of a message, a string, bytes or packed numbers."""
    return varint(field << 3 | _BYTES) + varint(len(payload)) + payload


def packed(field: int, values: list[int]) -> bytes:
    """A repeated integer field."""
    return block(field, b"".join(map(varint, values)))


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Every field of a message as (number, value): integers of varints, bytes of all else. Raises ValueError."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield key >> 3, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        if size is None or at + size > len(message):
            raise ValueError("not a protobuf message")
        yield key >> 3, message[at : at + size]
        at += size


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("not a protobuf message")
