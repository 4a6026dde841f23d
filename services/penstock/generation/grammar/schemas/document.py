"""A JSON schema as text and as plain data: numbers keep their written digits."""

from __future__ import annotations

import json
from typing import Any


class WrittenFloat(float):
    """Number with a point or an exponent; it is written again as it was read."""

    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        """Read it; `text` is a JSON number."""
        made = super().__new__(cls, text)
        made.text = text
        return made


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for NaN and infinities, and RecursionError."""
    return json.loads(text, parse_float=WrittenFloat, parse_constant=_refuse_constant)


def read_json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, and its end. Raises ValueError and RecursionError."""
    decoder = json.JSONDecoder(parse_float=WrittenFloat, parse_constant=_refuse_constant)
    return decoder.raw_decode(text, start)


def write_json(value: Any) -> str:
    """Return the JSON text of a value, in ASCII."""
    if isinstance(value, WrittenFloat):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {write_json(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(write_json, value)) + "]"
    return json.dumps(value)


def _refuse_constant(_: str) -> None:
    raise ValueError("not JSON")
