"""Standard output and error of a service that keeps running when their device is full."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any, TextIO

# A full device or quota, a file at its largest size, a disk that fails.
_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def lose_what_does_not_fit() -> None:
    """Drop output of this process that its device does not take, instead of ending the service with an error."""
    sys.stdout, sys.stderr = _surviving(sys.stdout), _surviving(sys.stderr)


class _Losing(io.RawIOBase):
    """File with writes that never fail because the device is full."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            return memoryview(data).nbytes


def _surviving(stream: TextIO) -> TextIO:
    with contextlib.suppress(AttributeError, OSError):
        # A stream without a descriptor, as in a process without output, stays as it is.
        stream.flush()
        return io.TextIOWrapper(
            io.BufferedWriter(_Losing(stream.fileno())),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=True,
        )
    return stream
