"""The header of a GGUF file (llama.cpp's, versions 2 and 3, little-endian): facts, and the places of tensors.

Not by the package `gguf`: its reader (0.19) maps the file, so that one that becomes shorter ends the process; it takes
the counts of facts, tensors and arrays from the file without a bound; and it makes objects of every text of an array,
and most of them are needed by no process. tests/unit/files holds this one against files that lie.
"""

from __future__ import annotations

import math
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from penstock.common.errors import StartupError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# struct's letters of the types of numbers.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# More than any file has, since a broken file may claim anything: bytes of all texts of arrays together, and of one
# other text.
_MOST_FACTS, _MOST_TENSORS = 1 << 16, 100_000
_MOST_ARRAY_TEXTS, _MOST_TEXT_BYTES, _MOST_NAME_BYTES = 1 << 21, 1 << 26, (1 << 16) - 1
_MOST_DIMENSIONS, _MOST_ALIGNMENT = 4, 1 << 20
# A model's numbers outside this range are no use in float32 arithmetic.
_LEAST_NUMBER, _MOST_NUMBER = 1e-30, 1e30
_MOST_WHOLE = 2**63 - 1
# Of a text, in front of it.
_LENGTH = struct.Struct("<Q")
_PIECE_BYTES = 1 << 18
# Most characters of a value in an error.
_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class GgufType:
    """A storage format of numbers: `numbers` of them take `num_bytes`."""

    name: str
    numbers: int
    num_bytes: int


TYPES = {
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: GgufType("Q4_0", 32, 18),
    3: GgufType("Q4_1", 32, 20),
    6: GgufType("Q5_0", 32, 22),
    7: GgufType("Q5_1", 32, 24),
    8: GgufType("Q8_0", 32, 34),
    10: GgufType("Q2_K", 256, 84),
    11: GgufType("Q3_K", 256, 110),
    12: GgufType("Q4_K", 256, 144),
    13: GgufType("Q5_K", 256, 176),
    14: GgufType("Q6_K", 256, 210),
    20: GgufType("IQ4_NL", 32, 18),
    23: GgufType("IQ4_XS", 256, 136),
    30: GgufType("BF16", 1, 2),
    39: GgufType("MXFP4", 32, 17),
}
# Names of unsupported types, for the error.
_OTHERS = {
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: its type, its shape with the rows first, the start and end of its bytes, and their file."""

    type: GgufType
    shape: tuple[int, ...]
    begin: int
    end: int
    path: Path


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of the metadata. It stays in the file until it is needed: most processes need none."""

    path: Path
    # struct's letter of its numbers; empty: texts.
    letter: str
    count: int
    begin: int
    end: int

    def numbers(self) -> Sequence[Any]:
        """Read the numbers. Raises OSError, and ValueError when the file is shorter."""
        found = array("b" if self.letter == "?" else self.letter)
        with self.path.open("rb") as file:
            found.frombytes(_Reader(file, self.begin).take(self.end - self.begin))
        return found

    def texts(self) -> list[str]:
        """Read the texts. Raises OSError, and ValueError when the file has changed."""
        # At once: a vocabulary has half a million of them.
        if self.end - self.begin > _MOST_TEXT_BYTES + _LENGTH.size * self.count:
            raise ValueError("its texts are longer than those of any file")
        with self.path.open("rb") as file:
            data = _Reader(file, self.begin).take(self.end - self.begin)
        found, place = [], 0
        for _ in range(self.count):
            (size,) = _LENGTH.unpack_from(data, place)
            place += _LENGTH.size + size
            if place > len(data):
                raise ValueError("it ends too early")
            found.append(data[place - size : place].decode())
        return found

    def __str__(self) -> str:
        return f"an array of {self.count}"


class GgufFile:
    """The metadata and the tensors of a file. A fact is a number, a text, true, false or a GgufArray.

    A model may consist of several files: `gguf_parts.read_gguf` reads them all.
    """

    def __init__(self, path: Path) -> None:
        """Read the header. Raises StartupError naming the file, and the broken or unsupported part."""
        self.path = path
        self.facts: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            # Not mapped: a file that is truncated meanwhile would kill the process.
            with path.open("rb") as file:
                self._read(_Reader(file))
        except (OSError, ValueError, struct.error, OverflowError) as error:
            raise self.error(f"is not a complete GGUF file: {str(error).splitlines()[0]}") from error

    def error(self, problem: str) -> StartupError:
        """Return an error that names the file."""
        return StartupError(f"{self.path} {problem}", flag="MODEL")

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return self.text("general.architecture", "")

    def whole(self, name: str, default: int | None = None, *, least: int = 0, most: int = _MOST_WHOLE) -> int | None:
        """Return a whole number; `default` without the fact. Raises StartupError naming it."""
        value = self.facts.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            upper = "" if most == _MOST_WHOLE else f" and at most {most}"
            raise self._wrong(name, f"is not a whole number of at least {least}{upper}")
        return value

    def number(self, name: str) -> float | None:
        """Return a number above 0; None without the fact. Raises StartupError naming it."""
        value = self.facts.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._wrong(name, "is not a number above 0")
        if not _LEAST_NUMBER <= value <= _MOST_NUMBER:
            raise self._wrong(name, f"is not between {_LEAST_NUMBER:g} and {_MOST_NUMBER:g}")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a text; `default` without the fact. Raises StartupError naming it."""
        value = self.facts.get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "is not a text")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false; `default` without the fact. Raises StartupError naming it."""
        value = self.facts.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "is neither true nor false")
        return value

    def texts(self, name: str) -> list[str]:
        """Return an array of texts. Raises StartupError naming the fact."""
        value = self.facts.get(name)
        if not isinstance(value, GgufArray) or value.letter:
            raise self._wrong(name, "is not an array of texts")
        try:
            return value.texts()
        except (OSError, ValueError, struct.error) as error:
            raise self.error(f"changed while it was read: {error}") from error

    def numbers(self, name: str) -> Sequence[Any]:
        """Return an array of numbers. Raises StartupError naming the fact."""
        value = self.facts.get(name)
        if not isinstance(value, GgufArray) or not value.letter:
            raise self._wrong(name, "is not an array of numbers")
        try:
            return value.numbers()
        except (OSError, ValueError, struct.error) as error:
            raise self.error(f"changed while it was read: {error}") from error

    def _wrong(self, name: str, problem: str) -> StartupError:
        value = self.facts.get(name)
        shown = str(value) if isinstance(value, GgufArray) else repr(value)
        if len(shown) > _SHOWN_CHARS:
            shown = f"{shown[:_SHOWN_CHARS]}…"
        return self.error(f"has {name} {shown}, which {problem}")

    def _read(self, reader: _Reader) -> None:
        if reader.take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_facts = reader.numbers("IQQ")
        if version not in _VERSIONS:
            raise self.error(f"has version {version}; supported are {', '.join(map(str, _VERSIONS))}")
        if num_tensors > _MOST_TENSORS or num_facts > _MOST_FACTS:
            raise ValueError("it claims more entries than any file has")
        for _ in range(num_facts):
            name = reader.text(_MOST_NAME_BYTES)
            if name in self.facts:
                raise ValueError(f"it has {name[:_SHOWN_CHARS]} twice")
            self.facts[name] = reader.value(self.path, *reader.numbers("I"))
        alignment = self.whole("general.alignment", 32, least=1, most=_MOST_ALIGNMENT) or 1
        found = [(reader.text(_MOST_NAME_BYTES), *self._entry(reader)) for _ in range(num_tensors)]
        data = -(-reader.position // alignment) * alignment
        for name, kind, shape, offset in found:
            self._place(name, kind, shape, data + offset, reader.size)

    def _place(self, name: str, kind: GgufType, shape: tuple[int, ...], begin: int, size: int) -> None:
        shown = name[:_SHOWN_CHARS]
        if name in self.tensors:
            raise ValueError(f"it has tensor {shown} twice")
        if not shape or shape[-1] % kind.numbers:
            raise self.error(f"tensor {shown} has shape {list(shape)}: its rows are not whole blocks of {kind.name}")
        end = begin + math.prod(shape) // kind.numbers * kind.num_bytes
        if end > size:
            raise self.error(f"is cut short: tensor {shown} ends at byte {end}, the file at {size}")
        self.tensors[name] = GgufTensor(kind, shape, begin, end, self.path)

    def _entry(self, reader: _Reader) -> tuple[GgufType, tuple[int, ...], int]:
        (count,) = reader.numbers("I")
        if count > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {count} dimensions")
        shape = tuple(reversed(reader.numbers(f"{count}Q"))) if count else ()
        number, offset = reader.numbers("IQ")
        if number not in TYPES:
            supported = ", ".join(one.name for one in TYPES.values())
            raise self.error(
                f"has tensors of type {_OTHERS.get(number, number)}; supported are {supported}: "
                "use a file with another quantization, or the model's safetensors"
            )
        return TYPES[number], shape, offset


class _Reader:
    """Reads values in order. Raises ValueError past the end, or past the limits of any file."""

    def __init__(self, file: BufferedReader, begin: int = 0) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size
        self.position = file.seek(begin)
        self._text_bytes = 0
        self._array_texts = 0

    def take(self, count: int) -> bytes:
        found = self._file.read(count) if count <= self.size - self.position else b""
        if len(found) < count:
            raise ValueError("it ends too early")
        self.position += count
        return found

    def numbers(self, letters: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{letters}", self.take(struct.calcsize(f"<{letters}")))

    def text(self, most: int = _MOST_TEXT_BYTES) -> str:
        (count,) = self.numbers("Q")
        self._text_bytes += count
        if count > most or self._text_bytes > _MOST_TEXT_BYTES:
            raise ValueError("its texts are longer than those of any file")
        return self.take(count).decode()

    def value(self, path: Path, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"a value has type {kind}")
        inner, count = self.numbers("IQ")
        begin = self.position
        if inner in _NUMBERS:
            end = begin + count * struct.calcsize(f"<{_NUMBERS[inner]}")
            if end > self.size:
                raise ValueError("it ends too early")
            self.position = self._file.seek(end)
            return GgufArray(path, _NUMBERS[inner], count, begin, end)
        self._array_texts += count
        if inner != _STRING or self._array_texts > _MOST_ARRAY_TEXTS:
            raise ValueError(f"an array has type {inner} or is too long")
        self._skip_texts(count)
        return GgufArray(path, "", count, begin, self.position)

    def _skip_texts(self, count: int) -> None:
        """Go behind some texts, by pieces of the file: one by one, half a million of them took a second."""
        piece, place = b"", 0
        for _ in range(count):
            if len(piece) - place < _LENGTH.size:
                self.position = self._file.seek(self.position + place)
                piece, place = self._file.read(_PIECE_BYTES), 0
                if len(piece) < _LENGTH.size:
                    raise ValueError("it ends too early")
            place += _LENGTH.size + _LENGTH.unpack_from(piece, place)[0]
            if self.position + place > self.size:
                raise ValueError("it ends too early")
        self.position = self._file.seek(self.position + place)
