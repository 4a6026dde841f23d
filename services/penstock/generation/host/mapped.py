"""Files mapped in the page cache, by all processes of a host together. No torch.

The mapping asks for large pages, since every step reads a weight from end to end. Linux gives them if the file system
has large folios (ext4 since 6.16, xfs), for data that is read from the disk through such a mapping.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from penstock.common.progress import CountBytes

# Bytes to bring into memory at a time, between two reports of progress.
PIECE_BYTES = 2**24
# Pages that are sampled to tell whether a file was replaced by another.
_PAGE_BYTES, _SAMPLED_PAGES = 4096, 1024
# Linux 5.14; not in Python's mmap.
_MADV_POPULATE_READ = 22


class _Buffer(ctypes.Structure):
    """Py_buffer; its first field is an address."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("format", "shape", "strides", "suboffsets", "internal")),
    )


class MappedFile:
    """A whole file in `memory`, with a check for later writes to it.

    A file that becomes shorter under its mapping ends the process that reads it (SIGBUS), and the process sees all
    writes into it. So such a file must be replaced by renaming a new one over it: the mapping keeps the old one.
    """

    def __init__(self, path: Path) -> None:
        """Map the file. Raises OSError, and ValueError when it is empty."""
        self.path = path
        # Descriptor of the file itself, even if the path leads to another one later.
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._state = self._look()
        # Samples of its data; taken at the first check, after they have been read.
        self._sample: bytes | None = None
        self.memory = _map(self._descriptor)

    def was_written(self) -> bool:
        """True when its size, its time of modification or its data have changed since it was mapped.

        A sample of the data is compared, and only when the time of the last change of any kind differs: it also changes
        with names and permissions, and nobody can set it back, as some tools do with the time of modification.

        May wait for a network file system. Raises OSError when the file cannot be read any more.
        """
        size, modified, changed = self._look()
        if (size, modified) != self._state[:2]:
            return True
        if self._sample is None or changed != self._state[2]:
            sample = self._take_sample(size)
            if self._sample not in (None, sample):
                return True
            if self._sample is None and changed == self._state[2] == self._look()[2]:
                self._sample = sample
            self._state = size, modified, changed
        return False

    def _look(self) -> tuple[int, int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _take_sample(self, size: int) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for place in range(0, size, max(_PAGE_BYTES, size // _SAMPLED_PAGES)):
            digest.update(os.pread(self._descriptor, _PAGE_BYTES, place))
        return digest.digest()


def map_file(path: Path) -> mmap.mmap:
    """Map all of a file, read-only, for a short use. Raises OSError, and ValueError when it is empty."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return _map(descriptor)
    finally:
        os.close(descriptor)


def _map(descriptor: int) -> mmap.mmap:
    memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Kernels without large pages refuse it.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def populate(memory: mmap.mmap, progress: CountBytes | None = None) -> None:
    """Bring every page into memory and into this process's page tables, in order.

    `progress` gets the bytes so far, and may raise to give up. On a system without such a call this only reports.
    """
    size = len(memory)
    for first in range(0, size, PIECE_BYTES):
        last = min(size, first + PIECE_BYTES)
        if sys.platform == "linux":
            # ctypes releases the interpreter's lock; mmap.madvise() would hold it while the disk is read.
            _libc().madvise(_address(memory) + first, last - first, _MADV_POPULATE_READ)
        if progress is not None:
            progress(last, size)


def populate_beside(path: Path) -> None:
    """Begin to bring the file into memory, on a thread that is not joined. Never raises."""

    def work() -> None:
        with contextlib.suppress(OSError, ValueError):
            populate(map_file(path))

    with contextlib.suppress(RuntimeError):
        threading.Thread(target=work, name="weights", daemon=True).start()


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _address(memory: mmap.mmap) -> int:
    """Return the address of its first byte; Python has no other way for read-only memory."""
    view = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(view), 0)
    try:
        return int(view.buf)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))


# Errors of a descriptor on a network file system when another host removed the file.
_GONE = (errno.ESTALE, errno.ENOENT)


class WeightsWritten(Exception):
    """Error for weights that were written to: no result can be trusted. The message names the file and the remedy."""


async def weights_written(files: Sequence[MappedFile], seconds: float) -> WeightsWritten:
    """Check `files` now and every `seconds`. Return when one was written to, or cannot be read.

    Renaming another file over one, and removing it, do not count: the mapping keeps the old file.
    """
    while True:
        problem = await asyncio.to_thread(_problem, files)
        if problem is not None:
            return WeightsWritten(problem)
        await asyncio.sleep(seconds)


def _problem(files: Sequence[MappedFile]) -> str | None:
    """Return the problem of the first file that has one, or None. Blocking: a network file system may be slow."""
    for file in files:
        try:
            if file.was_written():
                return (
                    f"{file.path} was written to while its weights were in use. Start again, and replace such files by "
                    "renaming a new one over them (or use --no-map-embeddings, where it is a checkpoint)"
                )
        except OSError as error:
            # After any other error, such as a short network failure, the next check may succeed.
            if error.errno in _GONE:
                return f"{file.path} cannot be read any more while its weights are in use ({error.strerror})"
    return None
