"""Memory for weights that a thread takes from the operating system while the process does something else. No torch.

Fresh memory costs its first user: the kernel clears it, and a virtual machine may have to get it from its host. While
Python imports torch, which one core does, another can pay for that, and later fill the gaps that packing leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading

# Touched at a time. A taker waits for no more than that.
PIECE_BYTES = 2**25
# Where a vector register, and a cache line, may begin.
ALIGNMENT = 64
# Room beyond what is touched, for weights that take more than was reckoned. Costs nothing while nobody writes there.
_SPARE = 1 / 8


class Arena:
    """One private mapping in large pages, handed out from its beginning and touched from its end by a thread, until the
    two meet.

    So the thread goes on beside those who fill what they took, and no core waits: packers wait for one another now and
    then. What was handed out lives as long as something refers to it. Methods may be called from any thread.
    """

    def __init__(self, num_bytes: int, untouched: int = 0) -> None:
        """For `num_bytes`, all but the last `untouched` of them touched from now on. Raises OSError where the system
        gives none."""
        size = int(num_bytes * (1 + _SPARE)) + PIECE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, size // mmap.PAGESIZE * mmap.PAGESIZE, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Refused by kernels without large pages.
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._end = num_bytes - untouched
        self._is_closed = False
        # Handed out before `_taken`; in memory from `_touched` to `_end`, being written from `_touching` to `_touched`.
        self._taken = 0
        self._touched = self._touching = self._end
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._touch, name="arena", daemon=True)
        self._thread.start()

    @property
    def num_touched(self) -> int:
        """Bytes that are in this process's memory already and not handed out."""
        with self._changed:
            return max(0, self._end - max(self._touched, self._taken))

    @property
    def num_taken(self) -> int:
        """Bytes that were handed out."""
        with self._changed:
            return self._taken

    def take(self, num_bytes: int) -> memoryview | None:
        """So much of it, aligned for vectors, holding anything; None when so much is not left or it is closed."""
        with self._changed:
            first = -(-self._taken // ALIGNMENT) * ALIGNMENT
            last = first + num_bytes
            if self._is_closed or last > len(self._memory):
                return None
            self._taken = last
            # The thread writes zeros, which must not meet what the taker writes.
            while max(first, self._touching) < min(last, self._touched):
                self._changed.wait()
        return memoryview(self._memory)[first:last]

    def close(self) -> None:
        """Hand out no more, and give back what nobody took. Returns when the thread has ended."""
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
            # Without the interpreter's lock. Not by MADV_POPULATE_WRITE: it holds the lock that every mmap() of the
            # importing thread needs, and that thread then waits where it should work.
            ctypes.memset(address + piece[0], 0, piece[1] - piece[0])
        del held

    def _next(self) -> tuple[int, int] | None:
        """The next piece to touch, from where to where; None when there is none."""
        with self._changed:
            last = self._touched = self._touching
            if not self._is_closed:
                self._touching = min(last, max(self._taken, last - PIECE_BYTES))
            self._changed.notify_all()
            return (self._touching, last) if self._touching < last else None


def open_arena(num_bytes: int, untouched: int = 0) -> Arena | None:
    """As Arena; None where there is little to touch, or no gain is known of, or the system refuses."""
    if sys.platform != "linux" or num_bytes - untouched < PIECE_BYTES:
        return None
    with contextlib.suppress(OSError, RuntimeError):
        return Arena(num_bytes, untouched)
    return None
