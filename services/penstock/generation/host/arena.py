"""Memory for weights: a thread gets it from the operating system while the process does other work. No torch.

Fresh memory costs its first user time: the kernel clears it, and a virtual machine may have to get it from its host.
While one core imports torch, another core can do that work. Later it fills the gaps that packing leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading

# Bytes to touch at a time. A taker waits at most for that.
PIECE_BYTES = 2**25
# Alignment of vector registers and cache lines.
ALIGNMENT = 64
# Share of untouched room for weights that take more than estimated. It costs nothing until it is written to.
_SPARE = 1 / 8


class Arena:
    """One private mapping in large pages. It is handed out from its beginning, and a thread touches it from its end.

    The thread goes on while other threads fill the memory that they took, until the two ends meet; it uses the time
    when packers wait for one another. Memory that was handed out lives as long as an object refers to it. Methods may
    be called from any thread.
    """

    def __init__(self, num_bytes: int, untouched: int = 0) -> None:
        """Map `num_bytes` and begin to touch all but the last `untouched` of them.

        Raises OSError when the system gives no memory.
        """
        size = int(num_bytes * (1 + _SPARE)) + PIECE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, size // mmap.PAGESIZE * mmap.PAGESIZE, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Kernels without large pages refuse it.
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._end = num_bytes - untouched
        self._is_closed = False
        # Bytes before `_taken` are handed out; `_touched` to `_end` are in memory; a write is at `_touching` on.
        self._taken = 0
        self._touched = self._touching = self._end
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._touch, name="arena", daemon=True)
        self._thread.start()

    @property
    def num_touched(self) -> int:
        """Number of bytes in this process's memory that are not handed out."""
        with self._changed:
            return max(0, self._end - max(self._touched, self._taken))

    @property
    def num_taken(self) -> int:
        """Number of bytes that were handed out."""
        with self._changed:
            return self._taken

    def take(self, num_bytes: int) -> memoryview | None:
        """Hand out `num_bytes`, aligned for vectors, not zeroed; None when too little is left or it is closed."""
        with self._changed:
            first = -(-self._taken // ALIGNMENT) * ALIGNMENT
            last = first + num_bytes
            if self._is_closed or last > len(self._memory):
                return None
            self._taken = last
            # The thread writes zeros, which must not overwrite the taker's data.
            while max(first, self._touching) < min(last, self._touched):
                self._changed.wait()
        return memoryview(self._memory)[first:last]

    def close(self) -> None:
        """Hand out no more, and give the rest back to the system. Returns when the thread has ended."""
        with self._changed:
            self._is_closed = True
        self._thread.join()
        first = -(-self._taken // mmap.PAGESIZE) * mmap.PAGESIZE
        if first < len(self._memory):
            self._memory.madvise(mmap.MADV_DONTNEED, first, len(self._memory) - first)

    def _touch(self) -> None:
        held = ctypes.c_char.from_buffer(self._memory)
        address = ctypes.addressof(held)
        while (piece := self._next()) is not None:
            # ctypes releases the interpreter's lock. MADV_POPULATE_WRITE would hold the lock that every mmap() of the
            # importing thread needs, and make that thread wait.
            ctypes.memset(address + piece[0], 0, piece[1] - piece[0])
        del held

    def _next(self) -> tuple[int, int] | None:
        """Return the next piece to touch, as (begin, end); None when there is none."""
        with self._changed:
            last = self._touched = self._touching
            if not self._is_closed:
                self._touching = min(last, max(self._taken, last - PIECE_BYTES))
            self._changed.notify_all()
            return (self._touching, last) if self._touching < last else None


def open_arena(num_bytes: int, untouched: int = 0) -> Arena | None:
    """Return an Arena; None if there is little to touch, no gain is known, or the system refuses."""
    if sys.platform != "linux" or num_bytes - untouched < PIECE_BYTES:
        return None
    with contextlib.suppress(OSError, RuntimeError):
        return Arena(num_bytes, untouched)
    return None
