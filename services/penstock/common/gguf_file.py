"""The header of a GGUF file (llama.cpp's, versions 2 and 3, little-endian): facts, and the places of tensors."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common.errors import StartupError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# struct's letters of the types of numbers.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# More than any file has; a broken one may say anything.
_MOST_ENTRIES = 1_000_000
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufType:
    """A way to keep numbers: `numbers` of them take `num_bytes`."""

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
    30: GgufType("BF16", 1, 2),
}
# Names of others, for their refusal.
_OTHERS = {
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: its type, its shape with the rows first, and where its bytes begin and end."""

    type: GgufType
    shape: tuple[int, ...]
    begin: int
    end: int


class GgufFile:
    """The facts and the tensors of a file."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises StartupError naming the file, and what is broken or not supported."""
        self.path = path
        self.facts: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                self._read(_Reader(memory))
        except (OSError, ValueError, struct.error, UnicodeDecodeError, OverflowError) as error:
            raise self.error(f"is no complete GGUF file: {str(error).splitlines()[0]}") from error

    def error(self, problem: str) -> StartupError:
        """Return an error that names the file."""
        return StartupError(f"{self.path} {problem}", flag="MODEL")

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return str(self.facts.get("general.architecture", ""))

    def _read(self, reader: _Reader) -> None:
        if reader.take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_facts = reader.numbers("IQQ")
        if version not in _VERSIONS:
            raise self.error(f"is of version {version}; supported are {', '.join(map(str, _VERSIONS))}")
        if num_tensors > _MOST_ENTRIES or num_facts > _MOST_ENTRIES:
            raise ValueError("it claims more entries than any file has")
        for _ in range(num_facts):
            name = reader.text()
            self.facts[name] = reader.value(*reader.numbers("I"))
        if int(self.facts.get("split.count", 0)) > 1:
            raise self.error("is a part of a split file: join them by llama.cpp's `llama-gguf-split --merge`")
        found = [(reader.text(), *self._entry(reader)) for _ in range(num_tensors)]
        alignment = int(self.facts.get("general.alignment", 32))
        if alignment < 1:
            raise ValueError("general.alignment is no positive number")
        data = -(-reader.position // alignment) * alignment
        for name, kind, shape, offset in found:
            if not shape or shape[-1] % kind.numbers:
                raise self.error(
                    f"tensor {name} has shape {list(shape)}, whose rows are no whole blocks of {kind.name}"
                )
            begin = data + offset
            end = begin + math.prod(shape) // kind.numbers * kind.num_bytes
            if end > reader.size:
                raise self.error(f"is cut short: tensor {name} ends at byte {end}, the file at {reader.size}")
            self.tensors[name] = GgufTensor(kind, shape, begin, end)

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
                "give a file quantised otherwise, or the model's safetensors"
            )
        return TYPES[number], shape, offset


class _Reader:
    """Reads one thing after the other. Raises ValueError or struct.error past the end."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.size = len(memory)
        self.position = 0

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise ValueError("it ends too early")
        self.position += count
        return self._memory[self.position - count : self.position]

    def numbers(self, letters: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{letters}", self._memory, self.position)
        self.position += struct.calcsize(f"<{letters}")
        return found

    def text(self) -> str:
        return self.take(*self.numbers("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"a value has type {kind}")
        inner, count = self.numbers("IQ")
        if inner in _NUMBERS:
            if count * struct.calcsize(f"<{_NUMBERS[inner]}") > self.size:
                raise ValueError("it ends too early")
            return list(self.numbers(f"{count}{_NUMBERS[inner]}"))
        if inner != _STRING or count > self.size:
            raise ValueError(f"an array has type {inner} or is too long")
        return [self.text() for _ in range(count)]
