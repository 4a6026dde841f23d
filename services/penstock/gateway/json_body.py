"""A request's body from bytes to a JSON object, within limits that are checked before anything is built from it.

The scan is a few passes of C over the bytes, so refusing a body costs little. It agrees with the parser on every body
that is JSON; both refuse any other.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from penstock.common.errors import InvalidArgument

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ALL = frozenset(range(256))
_NOT_STRUCTURE = bytes(_ALL - set(b'[]{},:"'))
_SQUARE = bytes(ord("[") if code == ord("{") else ord("]") if code == ord("}") else code for code in range(256))
# Every digit as 0, an exponent as e or e+, everything else as a space.
_NUMBERS = bytes(
    ord("0") if code in b"0123456789" else ord("e") if code in b"eE" else code if code in b"+" else ord(" ")
    for code in range(256)
)
# Below this exponent no number with an integer of `most_digits` is infinite.
_LARGE_EXPONENTS = (b"0e000", b"0e+000")
# Start of an escape for a lone surrogate.
_HALVES = (b"\\ud", b"\\uD")
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*+)"|[\[{]|[\]}]')
# Limits on the work for a refusal: the largest body that is searched for the field that is too deep, and the most
# values that are searched for the wrong one.
_SEARCHED_BYTES, _SEARCHED_VALUES = 1 << 16, 1 << 14
_SHOWN_PARTS, _SHOWN_CHARS = 8, 64


@dataclass(frozen=True)
class BodyBounds:
    """Limits on the contents of one body, besides its bytes. Not slotted: the configuration names the defaults."""

    # Depth of nested lists and objects.
    most_depth: int = 64
    # Values, including names of fields.
    most_values: int = 1 << 18
    # Lists and objects, which cost ten times as much as a number.
    most_containers: int = 1 << 14
    # Digits of an integer. At most 200: the check for infinite numbers relies on it.
    most_digits: int = 64


class _BadNumber:
    """A number that no field can hold, in its place."""

    def __init__(self, description: str) -> None:
        self.description = description


def parse_object(body: bytes, bounds: BodyBounds) -> dict[str, Any]:
    """Parse a body into a JSON object.

    Raises InvalidArgument: MALFORMED_MESSAGE if it is not a JSON object in UTF-8, else naming the field, or the body.
    """
    if body.startswith(_BYTE_ORDER_MARK):
        body = body[len(_BYTE_ORDER_MARK) :]
    # An escaped backslash does not escape the next character.
    has_escapes = b"\\" in body
    plain = body.replace(b"\\\\", b"__") if has_escapes else body
    _check_counts(body, plain, bounds)
    numbers: list[_BadNumber] = []
    try:
        parsed = _decoder(plain, bounds, numbers).decode(body.decode("utf-8"))
    except (ValueError, RecursionError):
        raise _malformed() from None
    if not isinstance(parsed, dict):
        raise InvalidArgument("body", "must be a JSON object", reason="MALFORMED_MESSAGE")
    if numbers:
        first = numbers[0]
        raise InvalidArgument(_name_of(parsed, lambda value: value is first) or "body", first.description)
    if has_escapes and any(half in plain for half in _HALVES) and is_broken_text(_ENCODER.encode(parsed)):
        raise InvalidArgument(_name_of(parsed, is_broken_text) or "body", "has a lone surrogate, which is not text")
    return parsed


def is_broken_text(value: Any) -> bool:
    """True for a text that UTF-8, and so protobuf, cannot hold."""
    if not isinstance(value, str) or value.isascii():
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _malformed() -> InvalidArgument:
    return InvalidArgument("body", "must be a JSON object (UTF-8)", reason="MALFORMED_MESSAGE")


def _no_number(name: str) -> float:
    """Refuse NaN and Infinity, which Python's parser accepts and JSON does not have."""
    raise ValueError(name)


def _check_counts(body: bytes, plain: bytes, bounds: BodyBounds) -> None:
    """Raise InvalidArgument for more values, or deeper ones, than the limits allow."""
    if b"\\" in plain:
        plain = plain.replace(b'\\"', b"")
    structure = plain.translate(None, _NOT_STRUCTURE)
    # An upper bound: texts also have such characters.
    containers, values = _counts(structure)
    if containers <= min(bounds.most_depth, bounds.most_containers) and values <= bounds.most_values:
        return
    # Every text is a value or a name.
    if structure.count(b'"') > 2 * bounds.most_values:
        raise _too_many("values", bounds.most_values, "--max-body-values")
    # The remains of empty texts go first, since most texts are empty by now.
    pieces = structure.replace(b'""', b"").split(b'"')
    if not len(pieces) % 2:
        raise _malformed()
    bare = b"".join(pieces[::2])
    containers, values = _counts(bare)
    if containers > bounds.most_containers:
        raise _too_many("lists and objects", bounds.most_containers, "--max-body-containers")
    if values > bounds.most_values:
        raise _too_many("values", bounds.most_values, "--max-body-values")
    if containers > bounds.most_depth:
        _check_depth(body, bare, bounds.most_depth)


def _counts(structure: bytes) -> tuple[int, int]:
    """Return the numbers of containers and of values; an empty container may count as two values."""
    containers = structure.count(b"[") + structure.count(b"{")
    return containers, containers + structure.count(b",") + structure.count(b":")


def _too_many(what: str, most: int, flag: str) -> InvalidArgument:
    return InvalidArgument("body", f"must not have more than {most} {what} ({flag})", reason="TOO_MANY")


def _check_depth(body: bytes, bare: bytes, most: int) -> None:
    """Raise InvalidArgument for brackets deeper than `most`. Each round removes the innermost ones."""
    brackets = bare.translate(_SQUARE, b",:")
    for _ in range(most):
        shorter = brackets.replace(b"[]", b"")
        if len(shorter) == len(brackets):
            break
        brackets = shorter
    if b"[]" in brackets:
        raise InvalidArgument(
            _deep_field(body, most), f"must not be nested more than {most} deep (--max-body-depth)", reason="TOO_DEEP"
        )
    if brackets:
        raise _malformed()


def _deep_field(body: bytes, most: int) -> str:
    """Name of the field in which the brackets get too deep; the body, if it is too large to search."""
    if len(body) > _SEARCHED_BYTES:
        return "body"
    depth, name = 0, "body"
    for token in _TOKEN.finditer(body.decode("utf-8", "replace")):
        first = token[0][0]
        if first == '"':
            if depth == 1:
                name = _shown(token[1])
        elif first in "[{":
            depth += 1
            if depth > most:
                return name
        else:
            depth -= 1
    return "body"


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _decoder(plain: bytes, bounds: BodyBounds, bad: list[_BadNumber]) -> json.JSONDecoder:
    """Return a decoder that puts numbers that no field can hold into `bad`.

    It is the slower decoder only if something in the body looks like such a number.
    """
    seen = plain.translate(_NUMBERS)
    has_digits = b"0" * (bounds.most_digits + 1) in seen
    if not has_digits and _LARGE_EXPONENTS[0] not in seen and _LARGE_EXPONENTS[1] not in seen:
        return _DECODER

    def refuse(description: str) -> _BadNumber:
        bad.append(_BadNumber(description))
        return bad[-1]

    def read_int(text: str) -> int | _BadNumber:
        most = bounds.most_digits
        return int(text) if len(text.lstrip("-")) <= most else refuse(f"must not have more than {most} digits")

    def read_float(text: str) -> float | _BadNumber:
        number = float(text)
        return number if math.isfinite(number) else refuse("is out of range")

    return json.JSONDecoder(
        parse_constant=_no_number, parse_float=read_float, parse_int=read_int if has_digits else None
    )


def _name_of(parsed: dict[str, Any], is_it: Callable[[Any], bool]) -> str | None:
    """Path of the first such value or name, as `messages[0].content`; None if the first values have none."""
    left, way = _SEARCHED_VALUES, cast("list[str | int]", [""])
    # Only one iterator for each level: a body may have many values.
    levels: list[Iterator[tuple[str | int, Any]]] = [iter(parsed.items())]
    while levels:
        for step, value in levels[-1]:
            left -= 1
            if left < 0:
                return None
            way[-1] = step
            if is_it(step):
                return _path(way)
            if isinstance(value, dict | list):
                levels.append(iter(value.items()) if isinstance(value, dict) else enumerate(value))
                way.append("")
                break
            if is_it(value):
                return _path(way)
        else:
            levels.pop()
            way.pop()
    return None


def _path(way: list[str | int]) -> str:
    steps = [f"[{step}]" if isinstance(step, int) else f".{_shown(step)}" for step in way[:_SHOWN_PARTS]]
    return "".join(steps).removeprefix(".") + ("…" if len(way) > _SHOWN_PARTS else "")


def _shown(name: str) -> str:
    """A name in the form that an error may show."""
    kept = name[:_SHOWN_CHARS]
    return "".join(each if each.isprintable() else "?" for each in kept) or "?"
