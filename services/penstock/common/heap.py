"""The C library's heap: glibc's. With another library, nothing is known or done."""

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
    """Return the free bytes in the heap, pages that were given back included; 0 when unknown."""
    try:
        ask = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return 0
    ask.restype = _Mallinfo
    return int(ask().fordblks)


def trim_heap() -> None:
    """Give freed memory back to the operating system; glibc keeps memory below a block in use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


# Ended objects between two garbage collections: a flood's garbage at once would hold up the loop for over 10 ms.
_SOME = 64
# One in this number of these collections takes the middle generation, too, and one in its square takes all. Collections
# by hand put off Python's own, which would.
_ONE_IN = 8


class HeapTrimmer:
    """Gives back a process's memory during and after a flood of short-lived objects.

    Belongs to one event loop. The flood's memory lies free in the heap, between blocks in use, and reference cycles
    (asyncio's own, for one) wait for a garbage collection that a quiet process seldom has.
    """

    def __init__(self, count: int, seconds: float) -> None:
        """Make it. `count` ended objects are a flood; from then on the heap is trimmed every `seconds`."""
        self._count, self._seconds = count, seconds
        # Ended objects: all, and those of a flood's period.
        self._ended = self._gone = 0
        self._timer: asyncio.TimerHandle | None = None

    def note(self) -> None:
        """Note that one has gone."""
        self._ended += 1
        self._gone += 1
        if self._ended % _SOME == 0:
            # The youngest generation has the short-lived objects, but for those that an earlier collection met alive.
            number = self._ended // _SOME
            gc.collect(2 if number % _ONE_IN**2 == 0 else int(number % _ONE_IN == 0))
        if self._gone >= self._count and self._timer is None:
            self._arm()

    def _arm(self) -> None:
        self._gone = 0
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._trim)

    def _trim(self) -> None:
        self._timer = None
        if self._gone >= _SOME:
            # The flood continues.
            self._arm()
        else:
            # All of what was made since the start.
            gc.collect()
        # In a thread: it releases Python's lock.
        asyncio.get_running_loop().run_in_executor(None, trim_heap)
