"""Fields that a caller set and that this release does not know.

Elsewhere they are ignored, as in protobuf, so that different releases can work together. In the options of a request
they are refused: an option without effect would silently change the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from penstock.common.errors import InvalidArgument


def refuse_unknown_fields(message: Message, path: str) -> None:
    """Check `message`, the request's field `path`, and all messages in it. Raises InvalidArgument with the number.

    It copies the message without unknown fields and compares two sizes, which takes microseconds.
    """
    known: Any = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    if known.ByteSize() == message.ByteSize():
        return
    where, number = next(_unknown(message, path))
    raise InvalidArgument(where, f"field number {number} is not known to this release", reason="UNKNOWN_FIELD")


def _unknown(message: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yield the path of each message with unknown fields, and the number of its first."""
    fields: Any = UnknownFieldSet(message)
    if len(fields):
        yield path, fields[0].field_number
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        inner = f"{path}.{field.name}"
        if isinstance(value, Message):
            yield from _unknown(value, inner)
        elif field.message_type.GetOptions().map_entry:
            continue
        else:
            for entry in value:
                yield from _unknown(entry, inner)
