"""Has the disk read what a mapping is about to touch: by itself the kernel reads little beyond a page."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

# Read beyond what is touched now. Tensors lie nearly in the order in which they are wanted.
AHEAD_BYTES = 2**26


class ReadAhead:
    """Of some safetensors files whose headers are known to be whole. Does nothing where the system takes no advice."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        # File -> tensor -> (rows, first byte, last byte); and up to where the disk was asked.
        self._places: dict[str, dict[str, tuple[int, int, int]]] = {}
        self._asked: dict[str, tuple[int, int]] = {}

    def advise(self, file: str, tensor: str, first: int, last: int) -> None:
        """Rows from `first` to `last` are touched next, and then what follows them. Raises OSError."""
        if not hasattr(os, "posix_fadvise"):
            return
        if file not in self._places:
            self._places[file] = _places(self._paths[file])
        rows, begin, end = self._places[file][tensor]
        each = (end - begin) // max(rows, 1)
        start, stop = begin + each * first, begin + each * last
        low, high = self._asked.get(file, (0, 0))
        if low <= start and stop + AHEAD_BYTES // 2 <= high:
            return
        self._asked[file] = (start, stop + AHEAD_BYTES)
        descriptor = os.open(self._paths[file], os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, start, stop + AHEAD_BYTES - start, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def _places(path: Path) -> dict[str, tuple[int, int, int]]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    found = {}
    for tensor, entry in header.items():
        if tensor != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            found[tensor] = (entry["shape"][0] if entry["shape"] else 1, begin, end)
    return found
