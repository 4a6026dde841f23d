"""Random protobuf messages of any type, by its descriptor: extreme numbers, odd texts, deep nesting, unknown fields.

Some are good messages with a few fields changed: what is drawn whole is mostly refused at its first bad field.
"""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

# In every text: it may appear in no log, metric or error.
CANARY = "c4nary"
_TEXTS = (
    "",
    "x",
    "\0",
    "鎽龥",
    "🙂" * 3,
    "<|im_end|>",
    "{% for a in range(9**9) %}",
    "\ud7ff\ue000",
    "../../etc/passwd",
)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, -1e38, 3e38, float("inf"), float("-inf"), float("nan"))
_SIGNED = (0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31))
_UNSIGNED = (0, 1, 2, 3, 7, 64, 300, 4095, 4096, 65_536, 2**31, 2**32 - 1)
_DEEPEST = 12


class RandomMessages:
    """Draws messages; the same seed, the same messages."""

    def __init__(self, seed: int | str) -> None:
        self._draw = random.Random(seed)

    def chance(self, share: float) -> bool:
        """Return True in `share` of the calls."""
        return self._draw.random() < share

    def message(self, kind: Any, density: float | None = None) -> Any:
        """Return a message of the class `kind`, in which each field is set with the chance `density`."""
        made = kind()
        self._fill(made, self._draw.choice((0.05, 0.2, 0.5)) if density is None else density, 0)
        return made

    def changed(self, message: Any) -> Any:
        """Return a copy of a message in which up to four fields, of messages within it too, are set or cleared."""
        made = type(message)()
        made.CopyFrom(message)
        for _ in range(self._draw.choice((0, 1, 1, 1, 2, 4))):
            self._change(made, 0)
        return made

    def damaged(self, data: bytes, one_of: int = 12) -> bytes:
        """Return the bytes of a message as they are, cut, with a byte changed, or with a field nobody knows.

        They stay as they are but for four cases in `one_of`.
        """
        draw = self._draw
        match draw.randrange(one_of):
            case 0:
                return data[: draw.randrange(len(data) + 1)]
            case 1 if data:
                place = draw.randrange(len(data))
                return data[:place] + bytes((draw.randrange(256),)) + data[place + 1 :]
            case 2:
                return data + b"\xba\x3e\x04" + draw.randbytes(4)
            case 3:
                return data * draw.randrange(2, 20)
            case _:
                return data

    def _fill(self, message: Any, density: float, depth: int) -> None:
        descriptor: Descriptor = message.DESCRIPTOR
        for field in descriptor.fields:
            if self._draw.random() < density and (field.message_type is None or depth < _DEEPEST):
                self._set(message, field, density, depth)

    def _set(self, message: Any, field: FieldDescriptor, density: float, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._fill_map(getattr(message, field.name), field, depth)
        elif field.is_repeated:
            self._fill_list(getattr(message, field.name), field, density, depth)
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            inner.SetInParent()
            self._fill(inner, density * 0.8, depth + 1)
        else:
            setattr(message, field.name, self._scalar(field))

    def _change(self, message: Any, depth: int) -> None:
        descriptor: Descriptor = message.DESCRIPTOR
        if not descriptor.fields:
            return
        draw, field = self._draw, self._draw.choice(descriptor.fields)
        is_message = field.message_type is not None and not field.message_type.GetOptions().map_entry
        entries = getattr(message, field.name)
        if draw.random() < 0.1:
            message.ClearField(field.name)
        elif is_message and not field.is_repeated and depth < _DEEPEST:
            entries.SetInParent()
            self._change(entries, depth + 1)
        elif is_message and field.is_repeated and len(entries) and draw.random() < 0.7:
            self._change(draw.choice(entries), depth + 1)
        else:
            self._set(message, field, 0.2, depth)

    def _fill_list(self, entries: Any, field: FieldDescriptor, density: float, depth: int) -> None:
        few = field.message_type is not None and depth > 2
        for _ in range(self._draw.choice((1, 1, 2, 5) if few else (1, 1, 2, 3, 17, 300))):
            if field.message_type is not None:
                self._fill(entries.add(), density * 0.6, depth + 1)
            else:
                entries.append(self._scalar(field))

    def _fill_map(self, entries: Any, field: FieldDescriptor, depth: int) -> None:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(self._draw.choice((1, 2, 40))):
            if value.message_type is None:
                entries[self._scalar(key)] = self._scalar(value)
            else:
                self._fill(entries[self._scalar(key)], 0.3, max(depth + 1, _DEEPEST - 3))

    def _scalar(self, field: FieldDescriptor) -> Any:
        draw = self._draw
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING:
                return self._bytes() if field.type == FieldDescriptor.TYPE_BYTES else self._text()
            case FieldDescriptor.CPPTYPE_BOOL:
                return draw.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                return draw.choice((*(value.number for value in field.enum_type.values), 77, -1))
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return draw.choice(_FLOATS) if draw.random() < 0.5 else draw.random() * 2
            case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_INT64:
                return draw.choice(_SIGNED)
            case FieldDescriptor.CPPTYPE_UINT64:
                return draw.choice((*_UNSIGNED, 2**63, 2**64 - 1))
            case _:
                return draw.choice(_UNSIGNED) if draw.random() < 0.5 else draw.randrange(64)

    def _bytes(self) -> bytes:
        return self._draw.randbytes(self._draw.choice((0, 1, 40)))

    def _text(self) -> str:
        draw = self._draw
        if draw.random() < 0.3:
            # As identifiers mostly are: what is named must not exist.
            return ""
        return draw.choice(_TEXTS) + CANARY + draw.choice(_TEXTS) * draw.choice((1, 1, 1, 300))
