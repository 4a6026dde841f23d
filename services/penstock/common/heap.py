"""The C library's heap."""

from __future__ import annotations

import contextlib
import ctypes


def trim_heap() -> None:
    """Give freed memory back to the operating system; glibc keeps it where a block above it is in use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
