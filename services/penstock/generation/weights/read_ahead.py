"""Has the disk read what a mapping is about to touch: by itself the kernel reads little beyond a page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.generation.weights.files import StoredTensor, read_header

# Read beyond what is touched now. Tensors lie nearly in the order in which they are wanted.
AHEAD_BYTES = 2**26


class ReadAhead:
    """Of some safetensors files whose headers are known to be whole. Does nothing where the system takes no advice."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        # File -> its tensors; and up to where the disk was asked.
        self._tensors: dict[str, dict[str, StoredTensor]] = {}
        self._asked: dict[str, tuple[int, int]] = {}

    def advise(self, file: str, tensor: str, first: int, last: int) -> None:
        """Rows from `first` to `last` are touched next, and then what follows them. Raises OSError."""
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
