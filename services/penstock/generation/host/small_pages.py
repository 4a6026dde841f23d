"""Memory in small pages until much of it is used, and in large ones from then on. No torch.

A pool has many places that fill up side by side. In large pages the first byte of each takes 2 MiB, small pages make
steps slower once there are thousands of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable

# Of x86-64. Where they are larger, calls fail.
_LARGE_PAGE = 1 << 21
# Linux 6.1; not in Python's mmap.
_MADV_COLLAPSE = 25


class SmallPages:
    """A private mapping of zeros. It has small pages until `leave`."""

    def __init__(self, num_bytes: int) -> None:
        """Map it. Raises MemoryError."""
        # Large pages lie at multiples of their size: none reaches beyond the mapping.
        size = num_bytes + 2 * _LARGE_PAGE
        try:
            self._mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"cannot map {size} bytes") from error
        # Kernels without large pages refuse it.
        with contextlib.suppress(OSError):
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        begin = -_address(self._mapping) % _LARGE_PAGE
        # At a multiple of a large page.
        self.memory = memoryview(self._mapping)[begin : begin + num_bytes]

    def leave(self, used: Iterable[tuple[int, int]]) -> None:
        """Get large pages from now on, and move to them what was written before: `used`, as (begin, end).

        The move goes on after the return, on a thread. Others may read and write meanwhile.
        """
        with contextlib.suppress(OSError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        ranges = list(used)
        # Without a thread they stay small, which is only slower.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._move, args=(ranges,), name="large-pages", daemon=True).start()

    def _move(self, ranges: list[tuple[int, int]]) -> None:
        address, libc = _address(self.memory), _libc()
        moved = 0
        for begin, end in ranges:
            first = max(moved, begin // _LARGE_PAGE * _LARGE_PAGE)
            moved = -(-end // _LARGE_PAGE) * _LARGE_PAGE
            # ctypes releases the interpreter's lock. A call that fails leaves small pages.
            libc.madvise(address + first, moved - first, _MADV_COLLAPSE)


def has_small_pages() -> bool:
    """Return True where small pages can become large ones."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return False
    # Of no bytes: the system only tells that it knows the advice.
    with contextlib.suppress(OSError, AttributeError):
        return bool(_libc().madvise(0, 0, _MADV_COLLAPSE) == 0)
    return False


def _address(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
