"""Memory of pools: zeros on pages that the operating system commits on their first write."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch
from torch import Tensor

# A cache line, as torch's own tensors are.
_ALIGNMENT = 64
# Of x86-64; on a machine with others more or fewer of a region's first pages are small.
_LARGE_PAGE = 1 << 21
# Of a region's beginning, at least.
_SMALL_BYTES = 1 << 18


def fresh_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None, *, regions: int = 0
) -> Tensor:
    """Return zeros on fresh pages; these are zero until they are written. torch.zeros would write gigabytes at every
    start. `device` None: in the host's memory.

    Pages are large. `regions`: number of equal parts that fill up side by side, each from its beginning. Their first
    pages are small then: a pool of 60 of them would take 120 MiB for one token. Raises MemoryError.
    """
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if regions and num_bytes and hasattr(mmap, "MADV_NOHUGEPAGE"):
        return torch.from_numpy(_mapped(num_bytes, regions)).view(dtype).view(shape)
    buffer = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    first = -buffer.ctypes.data % _ALIGNMENT
    return torch.from_numpy(buffer[first : first + num_bytes]).view(dtype).view(shape)


def _mapped(num_bytes: int, regions: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return a private mapping of its own with small pages at the beginning of each region. It lives as long as the
    array. Raises MemoryError."""
    # A page more than is needed. It is small, so that the mapping is no part of a neighbour in large pages.
    size = (num_bytes // mmap.PAGESIZE + 2) * mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot map {size} bytes") from error
    whole = np.frombuffer(memory, dtype=np.uint8)
    # Kernels without large pages refuse such advice.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
        for first, last in _small_pages(whole.ctypes.data, num_bytes, regions):
            memory.madvise(mmap.MADV_NOHUGEPAGE, first, min(last, size) - first)
        memory.madvise(mmap.MADV_NOHUGEPAGE, size - mmap.PAGESIZE, mmap.PAGESIZE)
    return whole[:num_bytes]


def _small_pages(address: int, num_bytes: int, regions: int) -> list[tuple[int, int]]:
    """Return where small pages begin and end, from the mapping's beginning at `address`. A large page lies at a
    multiple of its size; one that has a byte of these is small throughout."""
    found: list[tuple[int, int]] = []
    for number in range(regions):
        begin = number * num_bytes // regions
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        last = -(-(address + begin + _SMALL_BYTES) // _LARGE_PAGE) * _LARGE_PAGE - address
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return found
