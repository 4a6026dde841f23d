"""The C library's heap; glibc's, elsewhere nothing is known or done."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc


class _Mallinfo(ctypes.Structure):
    # glibc 2.33's mallinfo2.
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def free_heap_bytes() -> int:
    """Return the bytes that are free within the heap, those whose pages were given back included; 0 when unknown."""
    try:
        ask = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return 0
    ask.restype = _Mallinfo
    return int(ask().fordblks)


def trim_heap() -> None:
    """Give freed memory back to the operating system; glibc keeps it where a block above it is in use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


# Things that have gone until their garbage is looked for: a flood's at once would hold the loop up for 10 ms and more.
_SOME = 64


class HeapTrimmer:
    """Gives a process's memory back beside and behind a flood of things that have come and gone.

    Belongs to one event loop. What a flood took lies free in the heap, between blocks that are in use, and circles of
    objects (asyncio's own, for one) wait for a garbage collection that a quiet process hardly has.
    """

    def __init__(self, count: int, seconds: float) -> None:
        """Make it. `count` things that have gone are a flood; the heap is trimmed every `seconds` from then on."""
        self._count, self._seconds = count, seconds
        self._gone = 0
        self._timer: asyncio.TimerHandle | None = None

    def note(self) -> None:
        """Note that one has gone."""
        self._gone += 1
        if self._gone % _SOME == 0:
            # The young alone: those that have gone at once are among them.
            gc.collect(0)
        if self._gone >= self._count and self._timer is None:
            self._arm()

    def _arm(self) -> None:
        self._gone = 0
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._trim)

    def _trim(self) -> None:
        self._timer = None
        if self._gone >= _SOME:
            # It goes on.
            self._arm()
        else:
            gc.collect(1)
        # Beside the loop: it gives up Python's lock.
        asyncio.get_running_loop().run_in_executor(None, trim_heap)
