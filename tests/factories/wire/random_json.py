"""Random JSON in the form of requests: good ones with fields changed for extreme numbers, odd texts, depth and length.

The bytes are what no encoder of JSON writes, too: numbers of any length, NaN, keys that come twice, what is cut.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from factories.wire.random_messages import CANARY

_DIGITS = (20, 40, 310, 400, 4299, 4301, 6000)
_NUMBERS: tuple[Any, ...] = (0, -0.0, 1, -1, 2, 0.5, 1e308, -1e308, 5e-324, 1e-400, 255, 4096, 2**31, -(2**31) - 1)
_LARGE_NUMBERS: tuple[Any, ...] = (2**32, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 2**128, 10**300, 1e22)
_TEXTS = ("", "a", "\0", "🙂", "鎽龥", "\ud800", "x\udfff", "<|im_end|>", "{{ 1/0 }}", "../../etc/passwd", "\r\nx: y")
_LITERALS = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-1e999",
    b"01",
    b"+1",
    b"0x10",
    b"1.",
    b".5",
    b"'a'",
    b"nul",
)
_DEPTHS = (2, 20, 60, 98, 120, 600, 2000)
_COUNTS = (0, 1, 2, 17, 300)
_WHITE = (b"\xef\xbb\xbf", b"\0", b" " * 100, b"\xff\xfe", b"[", b"null,")
# What stands for bytes in a value until it is written.
_MARK = "\x01bytes-{}\x01"


class RandomJson:
    """Draws bodies; the same source, the same bodies."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._raw: list[bytes] = []

    def body(self, good: Mapping[str, Callable[[random.Random], Any]], required: Sequence[str]) -> bytes:
        """Write a request: required fields and some of the others of `good`, some of them changed.

        `good`: name of a field -> what draws a good value.
        """
        draw = self._draw
        self._raw.clear()
        names = list(required)
        names += draw.sample(list(good), min(len(good), draw.choice((0, 1, 2, 3, 5, 9))))
        made: Any = {name: good[name](draw) for name in names}
        for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
            made = self._changed(made, 0)
        if draw.random() < 0.2 and isinstance(made, dict):
            made[f"field{draw.randrange(9)}" if draw.random() < 0.9 else draw.choice(_TEXTS)] = self.value()
        return self._damaged(self._written(made))

    def value(self, depth: int = 0) -> Any:
        """Draw a value of any kind."""
        draw = self._draw
        match draw.randrange(11):
            case 0 | 1:
                return draw.choice(_NUMBERS)
            case 2:
                return draw.choice(_LARGE_NUMBERS)
            case 3:
                return self._bytes(self._long_number())
            case 4:
                return draw.choice((True, False, None))
            case 5 | 6:
                return self.text()
            case 7:
                return self._bytes(self._nested())
            case 8:
                return self._bytes(draw.choice(_LITERALS))
            case 9:
                item = self.value(depth + 1) if depth < 4 else draw.choice(_NUMBERS)
                return [item] * draw.choice(_COUNTS if depth == 0 else _COUNTS[:3])
            case _:
                count = draw.choice((0, 1, 3, 40)) if depth == 0 else 1
                return {self.text(): self.value(depth + 1) if depth < 4 else 1 for _ in range(count)}

    def text(self) -> str:
        """Draw a text."""
        draw = self._draw
        return draw.choice(_TEXTS) * draw.choice((1, 1, 1, 1, 200)) + draw.choice(("", "", CANARY))

    def _changed(self, value: Any, depth: int) -> Any:
        """Return the value with one thing in it, at any depth, drawn anew, doubled, wrapped or left out."""
        draw = self._draw
        if isinstance(value, dict) and value and (depth == 0 or draw.random() < 0.7):
            name = draw.choice(list(value))
            if draw.random() < 0.1:
                return {key: one for key, one in value.items() if key != name}
            return {**value, name: self._changed(value[name], depth + 1)}
        if isinstance(value, list) and value and draw.random() < 0.7:
            place = draw.randrange(len(value))
            if draw.random() < 0.2 and len(value) < 20:
                return value * draw.choice((2, 20, 300))
            return [*value[:place], self._changed(value[place], depth + 1), *value[place + 1 :]]
        if draw.random() < 0.15:
            return [value] if draw.random() < 0.5 else {"type": value}
        return self.value(depth)

    def _long_number(self) -> bytes:
        draw = self._draw
        digits = b"9" * draw.choice(_DIGITS)
        return draw.choice((b"", b"-")) + digits + draw.choice((b"", b"", b".5", b"e9", b"e-9"))

    def _nested(self) -> bytes:
        draw, depth = self._draw, self._draw.choice(_DEPTHS)
        begin, end = draw.choice(
            ((b"[", b"]"), (b'{"a":', b"}"), (b'[{"type":', b"}]"), (b'{"properties":{"a":', b"}}"))
        )
        return begin * depth + draw.choice((b"1", b"[]", b'"a"', b"null")) + end * depth

    def _bytes(self, raw: bytes) -> str:
        self._raw.append(raw)
        return _MARK.format(len(self._raw) - 1)

    def _written(self, value: Any) -> bytes:
        text = json.dumps(value, ensure_ascii=self._draw.random() < 0.8).encode("utf-8", "surrogatepass")
        for number, raw in enumerate(self._raw):
            text = text.replace(json.dumps(_MARK.format(number)).encode(), raw)
        return text

    def _damaged(self, body: bytes) -> bytes:
        draw = self._draw
        match draw.randrange(40):
            case 0:
                return body[: draw.randrange(len(body) + 1)]
            case 1 if body:
                place = draw.randrange(len(body))
                return body[:place] + bytes((draw.randrange(256),)) + body[place + 1 :]
            case 2:
                return draw.choice(_WHITE) + body
            case 3:
                # The second of two fields of a name counts.
                return body[:-1] + b"," + body[1:] if len(body) > 2 else body + body
            case 4:
                return b"[" + body + b"]"
            case 5:
                return b""
            case _:
                return body
