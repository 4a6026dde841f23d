"""Reading a folder of safetensors: names and shapes are checked before any data is read, then tensors come in pieces.

A piece is a view of a memory-mapped file until it is converted. A file is unmapped when its last tensor is read, and
mapped anew after every RELEASE_BYTES: for tensors of any size, the read pages take at most that much of the process's
memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.common.dtypes import stored_bytes
from penstock.common.errors import StartupError
from penstock.common.progress import CountBytes
from penstock.generation.devices.torch_dtypes import STORED_DTYPES
from penstock.generation.host.mapped import MappedFile
from penstock.generation.weights.files import (
    IGNORED_SUFFIX,
    INDEX_FILE,
    SINGLE_FILE,
    StoredTensor,
    indexed_files,
    read_header,
    stored_tensors,
)
from penstock.generation.weights.plain_tensors import PlainTensors

# Pages that were read stay resident until their mapping goes.
RELEASE_BYTES = 2**25
# Most bytes of a piece, unless a single row is larger.
PIECE_BYTES = 2**24
# Names listed in one message.
_MAX_NAMED = 5


class Checkpoint(PlainTensors):
    """The tensors of one model folder, a TensorSource."""

    def __init__(self, folder: Path, progress: CountBytes | None = None) -> None:
        """Open every file's header. Raises StartupError naming the file (and tensor) that is missing or broken."""
        self.folder = folder
        self._files: dict[str, Any] = {}
        # tensor -> (file, shape, safetensors dtype)
        self._tensors: dict[str, tuple[str, tuple[int, ...], str]] = {}
        # Names in the files of tensors that have others here.
        self._stored: dict[str, str] = {}
        # Texts in the files' headers.
        self.metadata: dict[str, str] = {}
        self._progress = progress
        self._taken_bytes = 0
        self._resident_bytes = 0
        listed = indexed_files(folder)
        for name in dict.fromkeys(listed.values()) if listed else (SINGLE_FILE,):
            self._open(name)
        for tensor, name in listed.items():
            if self._tensors.get(tensor, ("",))[0] != name:
                raise StartupError(f"{folder / name} has no tensor {tensor}, which {INDEX_FILE} promises", flag="MODEL")
        # Tensors of each file that have not been read completely.
        self._left = {
            name: {tensor for tensor, entry in self._tensors.items() if entry[0] == name} for name in self._files
        }
        self._ahead = ReadAhead({name: folder / name for name in self._files})
        self.total_bytes = sum(self._size(tensor) for tensor in self._tensors)

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    def dtype(self, tensor: str) -> torch.dtype:
        """Return the dtype that the tensor is stored in."""
        return STORED_DTYPES[self._tensors[tensor][2]]

    def stored_as(self, tensor: str) -> str:
        """Return safetensors' name of the tensor's stored dtype."""
        return self._tensors[tensor][2]

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        optional: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, tuple[str, ...]] | None = None,
        *,
        asks: str = "config.json",
    ) -> None:
        """Raise StartupError naming missing, unexpected and wrongly shaped tensors, and ones in an unusable dtype.

        `dtypes`: safetensors' names of the dtypes of tensors that may have others than most. `asks`: the origin of the
        expectations.
        """
        missing = [name for name in expected if name not in self._tensors]
        if missing:
            raise StartupError(f"{self.folder} lacks {_some(missing)} that {asks} asks for", flag="MODEL")
        shapes = {**expected, **optional}
        unexpected = [name for name in self._tensors if name not in shapes]
        if unexpected:
            files = ", ".join(sorted({self._tensors[name][0] for name in unexpected}))
            raise StartupError(f"{self.folder}: {files} has unexpected {_some(unexpected)}", flag="MODEL")
        for name, (file, found, dtype) in self._tensors.items():
            if found != shapes[name]:
                raise StartupError(
                    f"{self.folder / file}: tensor {name} has shape {list(found)}, {asks} asks for "
                    f"{list(shapes[name])}",
                    flag="MODEL",
                )
            allowed = (dtypes or {}).get(name, tuple(STORED_DTYPES))
            if dtype not in allowed:
                raise StartupError(
                    f"{self.folder / file}: tensor {name} is stored as {dtype}; supported are {', '.join(allowed)}",
                    flag="MODEL",
                )

    def leave_out(self, prefix: str) -> None:
        """Take tensors with names that begin so for absent: nothing will read them."""
        for tensor in [name for name in self._tensors if name.startswith(prefix)]:
            file, *_ = self._tensors[tensor]
            self.total_bytes -= self._size(tensor)
            self._left[file].discard(tensor)
            del self._tensors[tensor]

    def rename(self, prefix: str, new: str) -> None:
        """Give tensors with names that begin with `prefix` the beginning `new` instead; none may have that name."""
        for stored in [name for name in self._tensors if name.startswith(prefix)]:
            tensor = new + stored.removeprefix(prefix)
            if tensor in self._tensors:
                raise StartupError(f"{self.folder} has both {stored} and {tensor}", flag="MODEL")
            self._tensors[tensor] = entry = self._tensors.pop(stored)
            self._stored[tensor] = stored
            self._left[entry[0]].remove(stored)
            self._left[entry[0]].add(tensor)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the tensor's stored shape."""
        return self._tensors[tensor][1]

    def take(self, tensor: str) -> Tensor:
        """Return a small tensor as a whole, in its stored dtype, as a view of the file: convert or copy it."""
        value = self._view(tensor, 0, (self.shape(tensor) or (1,))[0])
        self._read(tensor)
        return value

    def row(self, tensor: str, number: int) -> Tensor:
        """Return one row of a tensor of two or more dimensions, as `take`. The last row ends the tensor."""
        value = self._view(tensor, number, number + 1)[0]
        rows, size = self.shape(tensor)[0], self._size(tensor)
        if number + 1 == rows:
            self._read(tensor)
        elif tensor in self._left[self._tensors[tensor][0]]:
            self._report(self._taken_bytes + size * (number + 1) // rows)
        return value

    def pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[Tensor]:
        """Yield the tensor's rows in order, some at a time, in their stored dtype, as views of the file. Drop a piece
        before asking for the next. Each piece except the last has a multiple of `multiple` rows."""
        rows = self.shape(tensor)[0]
        size = self._size(tensor)
        some = max(1, PIECE_BYTES * rows // max(size, 1) // multiple) * multiple
        is_new = tensor in self._left[self._tensors[tensor][0]]
        for first in range(0, rows, some):
            last = min(first + some, rows)
            yield self._view(tensor, first, last)
            if is_new:
                self._report(self._taken_bytes + size * last // rows)
        self._read(tensor)

    def mapped(self, tensor: str) -> tuple[MappedFile, int]:
        """Return the mapped file with the tensor, and the offset of its bytes there. Reading them from the disk begins,
        without waiting."""
        name, shape, dtype = self._tensors[tensor]
        try:
            if tensor in self._left[name]:
                self._ahead.advise(name, self._stored.get(tensor, tensor), 0, shape[0])
            file = MappedFile(self.folder / name)
            stored = stored_tensors(file.memory).get(self._stored.get(tensor, tensor))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _broken(self.folder / name, error) from error
        place = None if stored is None else (stored.dtype, stored.shape, stored.end - stored.begin)
        if stored is None or place != (dtype, shape, self._size(tensor)) or stored.end > len(file.memory):
            raise self._changed(name)
        self._read(tensor)
        return file, stored.begin

    def are_equal(self, one: str, other: str) -> bool:
        """True when two tensors of one shape hold the same numbers, as stored."""
        if self.dtype(one) != self.dtype(other):
            return False
        pairs = zip(self.pieces(one), self.pieces(other), strict=True)
        return all(torch.equal(*pair) for pair in pairs)

    def _view(self, tensor: str, first: int, last: int) -> Tensor:
        file, shape, _ = self._tensors[tensor]
        try:
            if file not in self._files or self._resident_bytes > RELEASE_BYTES:
                self._files[file] = safe_open(self.folder / file, framework="pt", device="cpu")
                self._resident_bytes = 0
            name = self._stored.get(tensor, tensor)
            self._ahead.advise(file, name, first, last)
            part = self._files[file].get_slice(name)
            value: Tensor = part[first:last] if shape else part[...]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise _broken(self.folder / file, error) from error
        if tuple(value.shape) != ((last - first, *shape[1:]) if shape else ()):
            raise self._changed(file)
        self._resident_bytes += value.nbytes
        return value

    def _read(self, tensor: str) -> None:
        """Note that the tensor is read completely, for the first time or again."""
        left = self._left[self._tensors[tensor][0]]
        if tensor in left:
            left.remove(tensor)
            self._taken_bytes += self._size(tensor)
            self._report(self._taken_bytes)
        if not left:
            self._files.pop(self._tensors[tensor][0], None)

    def _changed(self, file: str) -> StartupError:
        return StartupError(f"{self.folder / file} changed while it was being loaded", flag="MODEL")

    def _report(self, taken_bytes: int) -> None:
        if self._progress is not None:
            self._progress(taken_bytes, self.total_bytes)

    def _open(self, name: str) -> None:
        path = self.folder / name
        if not path.is_file():
            raise StartupError(f"{path} does not exist, but {INDEX_FILE} names it", flag="MODEL")
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            self.metadata |= file.metadata() or {}
            names: list[str] = file.keys()
            for tensor in names:
                if tensor.endswith(IGNORED_SUFFIX):
                    continue
                part = file.get_slice(tensor)
                self._tensors[tensor] = (name, tuple(part.get_shape()), str(part.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise _broken(path, error) from error
        self._files[name] = file

    def _size(self, tensor: str) -> int:
        _, shape, dtype = self._tensors[tensor]
        return math.prod(shape) * stored_bytes(dtype, 4)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def _broken(path: Path, error: Exception) -> StartupError:
    return StartupError(f"{path} is not a complete safetensors file: {str(error).splitlines()[0]}", flag="MODEL")


# Bytes to read ahead of the rows being read. Tensors lie nearly in the order of their use.
AHEAD_BYTES = 2**26


class ReadAhead:
    """Read-ahead advice to the system for safetensors files with complete headers. Does nothing on a system without
    such advice."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        # File -> its tensors, and file -> the range that the disk was asked for.
        self._tensors: dict[str, dict[str, StoredTensor]] = {}
        self._asked: dict[str, tuple[int, int]] = {}

    def advise(self, file: str, tensor: str, first: int, last: int) -> None:
        """Begin to read rows from `first` to `last`, which are used next, and the bytes after them. Raises OSError."""
        if not hasattr(os, "posix_fadvise"):
            return
        if file not in self._tensors:
            self._tensors[file] = read_header(self._paths[file])
        stored = self._tensors[file][tensor]
        rows = stored.shape[0] if stored.shape else 1
        each = (stored.end - stored.begin) // max(rows, 1)
        start, stop = stored.begin + each * first, stored.begin + each * last
        low, high = self._asked.get(file, (0, 0))
        if low <= start and stop + AHEAD_BYTES // 2 <= high:
            return
        self._asked[file] = (start, stop + AHEAD_BYTES)
        descriptor = os.open(self._paths[file], os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, start, stop + AHEAD_BYTES - start, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
