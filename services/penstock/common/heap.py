"""The C library's heap; glibc's, elsewhere nothing is known or done."""

from __future__ import annotations

import contextlib
import ctypes


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
