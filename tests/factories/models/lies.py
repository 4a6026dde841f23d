"""Files that lie: a document with each value replaced by each of a list of hostile ones, and what comes of it."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

from penstock.common.errors import FailedPrecondition, InvalidArgument, StartupError


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


# JSON values by their names; ABSENT: the field is left out.
ABSENT = object()
HOSTILE: dict[str, Any] = {
    "absent": ABSENT,
    "null": None,
    "true": True,
    "false": False,
    "0": 0,
    "-1": -1,
    "3": 3,
    "2**31": 2**31,
    "2**64": 2**64,
    "10**400": 10**400,
    "0.5": 0.5,
    "-0.5": -0.5,
    "1e-308": 1e-308,
    "1e308": 1e308,
    "inf": float("inf"),
    "nan": float("nan"),
    "no text": "",
    "text": "x",
    "number as text": "7",
    "half a character": "\ud800",
    "NUL": "a\0b",
    "path": "../../../etc/passwd",
    "long text": "x" * 100_000,
    "no list": [],
    "list": [1],
    "list of lists": [[1]],
    "list of texts": ["x"],
    "list of nulls": [None, None],
    "long list": [1] * 20_000,
    "no object": {},
    "object": {"a": 1},
    "object of lists": {"": [{}]},
    "deep": _nested(300),
}
Path = tuple[str | int, ...]


def places(document: Any, path: Path = (), *, of_lists: int = 2) -> Iterator[Path]:
    """Yield the place of every value; of a list only those of its first entries."""
    yield path
    if isinstance(document, dict):
        for key in document:
            yield from places(document[key], (*path, key), of_lists=of_lists)
    elif isinstance(document, list):
        for number in range(min(len(document), of_lists)):
            yield from places(document[number], (*path, number), of_lists=of_lists)


def lies(document: Any, *, added: Iterable[str] = (), of_lists: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield (name, document) with one value replaced; `added`: fields that the document may have and lacks."""
    for path in [*places(document, of_lists=of_lists), *((name,) for name in added)]:
        for name, value in HOSTILE.items():
            if value is ABSENT and not path:
                continue
            yield f"{'.'.join(map(str, path)) or 'all'}: {name}", replaced(document, path, value)


def replaced(document: Any, path: Path, value: Any) -> Any:
    """Return a copy of the document with `value` at `path`."""
    if not path:
        return value
    document = copy.copy(document)
    if len(path) > 1:
        document[path[0]] = replaced(document[path[0]], path[1:], value)
    elif value is ABSENT:
        document.pop(path[0]) if isinstance(document, list) else document.pop(path[0], None)
    else:
        document[path[0]] = value
    return document


def texts(document: Any) -> Iterator[tuple[str, bytes]]:
    """Yield files that are no JSON, or JSON that no document is."""
    whole = json.dumps(document).encode()
    for size in range(0, len(whole), max(1, len(whole) // 20)):
        yield f"cut off at {size}", whole[:size]
    yield "a deep list", b"[" * 100_000
    yield "a deep object", b'{"a":' * 100_000
    yield "twice", whole[:-1] + b"," + whole[1:]
    yield "a long number", whole[:-1] + b',"x":' + b"9" * 5000 + b"}"
    yield "no UTF-8", b"\xff\xfe" + whole
    yield "a byte order mark", b"\xef\xbb\xbf" + whole
    yield "NULs", bytes(1000)


def damaged(content: bytes, count: int, *, within: int | None = None, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes cut off at `count` places, and as often with some bytes changed; all `within` the first."""
    draw = random.Random(seed)
    size = min(within or len(content), len(content))
    for _ in range(count):
        end = draw.randrange(size)
        yield f"cut off at {end}", content[:end]
        changed = bytearray(content)
        where = [draw.randrange(size) for _ in range(draw.choice((1, 1, 2, 8)))]
        for place in where:
            changed[place] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        yield f"changed at {where}", bytes(changed)


def safetensors(header: Any, data: bytes) -> bytes:
    """A file of this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def opened(content: bytes) -> tuple[Any, bytes]:
    """The header and the tensors' bytes of a safetensors file."""
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end]), content[end:]


def rewrite(file: File, content: bytes) -> None:
    """Write a new file in the place of one. Where a file is emptied and written again, ext4 waits for the disk."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)


def _array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + data


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


# Values of facts of a GGUF file, with their types, by their names.
HOSTILE_FACTS: dict[str, bytes] = {
    "u8 0": struct.pack("<IB", 0, 0),
    "u8 3": struct.pack("<IB", 0, 3),
    "i8 -1": struct.pack("<Ib", 1, -1),
    "u32": struct.pack("<II", 4, 2**32 - 1),
    "u64": struct.pack("<IQ", 10, 2**64 - 1),
    "i64": struct.pack("<Iq", 11, -(2**63)),
    "i64 2**62": struct.pack("<Iq", 11, 2**62),
    "f32 nan": struct.pack("<If", 6, float("nan")),
    "f32 inf": struct.pack("<If", 6, float("inf")),
    "f32 0": struct.pack("<If", 6, 0.0),
    "f32 2.5": struct.pack("<If", 6, 2.5),
    "f64 1e308": struct.pack("<Id", 12, 1e308),
    "f64 1e-308": struct.pack("<Id", 12, 1e-308),
    "true": struct.pack("<I?", 7, True),
    "false": struct.pack("<I?", 7, False),
    "no text": struct.pack("<I", 8) + _text(b""),
    "text": struct.pack("<I", 8) + _text(b"x"),
    "long text": struct.pack("<I", 8) + _text(b"x" * 100_000),
    "no UTF-8": struct.pack("<I", 8) + _text(b"\xff"),
    "a text of 2**60": struct.pack("<IQ", 8, 2**60),
    "no array": _array(4, 0, b""),
    "array": _array(4, 2, struct.pack("<II", 1, 2)),
    "long array": _array(4, 100_000, bytes(400_000)),
    "array of floats": _array(6, 1, struct.pack("<f", float("nan"))),
    "array of flags": _array(7, 3, b"\1\0\7"),
    "array of no texts": _array(8, 0, b""),
    "array of texts": _array(8, 2, _text(b"a") + _text(b"b")),
    "array of arrays": _array(9, 1, struct.pack("<IQI", 4, 1, 1)),
    "array of 2**60": _array(4, 2**60, b""),
    "array of 2**60 texts": _array(8, 2**60, b""),
    "no type": struct.pack("<I", 99),
}


@dataclass
class Outcomes:
    """Outcomes of files that lie: each is read, or refused by a typed error whose message can be sent to anybody."""

    typed: tuple[type[Exception], ...] = (StartupError, InvalidArgument, FailedPrecondition)
    read: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    def note(self, name: str, load: Callable[[], object]) -> None:
        """Load, and count the outcome."""
        try:
            load()
            self.read += 1
        except self.typed as error:
            self.refused += 1
            message = str(error)
            if len(message) > 2500 or "\ud800" in message or "\0" in message:
                self.wrong.append(f"{name}: a message of {len(message)} characters: {message[:80]!r}")
        except Exception as error:  # what the test looks for
            self.wrong.append(f"{name}: {type(error).__name__}: {str(error)[:160]}")

    def check(self, least: int) -> None:
        """Raise AssertionError when some outcome was another, or there were fewer than `least`."""
        assert not self.wrong, f"{len(self.wrong)} of {self.read + self.refused + len(self.wrong)}: " + "\n".join(
            self.wrong[:40]
        )
        assert self.read + self.refused >= least
        # The valid file was read.
        assert self.read > 0
