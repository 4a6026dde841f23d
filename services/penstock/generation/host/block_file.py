"""A file of blocks under keys, each checked by a hash, shared by processes of this host. It survives all of them.

It is read and written by calls, not mapped: a mapped file that somebody cuts short, or a disk that is full, ends the
process (SIGBUS).

    header | sets: keys of all places, then a checksum and a stamp for each | blocks

A key has a set of places, by its first bytes. The place in a set with the oldest stamp gives way. So no index has to be
kept in step by several processes, and a process that is killed leaves nothing to repair: a place has its key only while
its block is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.common.units import format_size

_log = get_logger(__name__)
FLAG, SIZE_FLAG = "--kv-disk", "--kv-disk-size"
KEY_BYTES = 32
# Bytes of the file's own name for itself, with the version of its layout.
_MAGIC = b"penstock blocks1"
# Magic, bytes of a block, number of sets, places of a set; the checksum of these.
_HEADER = struct.Struct("<16sQQQ")
_CHECKSUM = struct.Struct("<L")
# Of a place: hash of key and block, time of its last use in nanoseconds.
_STATE = struct.Struct("<32sQ")
_STAMP = struct.Struct("<Q")
_PAGE = 4096
# More places in a set come nearer to the order of use in the whole file, and take longer to look through.
_PLACES = 64
_NO_KEY = bytes(KEY_BYTES)
# struct flock on 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
# Byte that the processes which use the file have locked together.
_IN_USE = 0


class Found(Enum):
    """Result of reading a block."""

    READ = "read"
    # It is not there, or others took its place meanwhile.
    ABSENT = "absent"
    # It is there and not what was written. It is forgotten.
    REFUSED = "refused"


class Written(NamedTuple):
    """Result of writing a block: was it new, and did another one give way?"""

    is_new: bool
    evicted: bool = False


class BlockFile:
    """Open file of blocks of `block_bytes`. Processes and threads may share it; an object is one thread's at a time,
    except `has`, `read` and `write` beside each other."""

    def __init__(self, path: Path, block_bytes: int, num_bytes: int) -> None:
        """Open or make a file of at most `num_bytes`. One with another geometry is made anew unless a process uses it.

        Raises StartupError naming the flag: it is in use with another geometry, it is no such file, or cannot be had.
        """
        self.path = path
        self.block_bytes = block_bytes
        # Locks of the file are the open file's: threads that share it have this one, too.
        self._mutex = threading.Lock()
        self._slot_bytes = -(-block_bytes // _PAGE) * _PAGE
        slots = max(num_bytes - 2 * _PAGE, 0) // (self._slot_bytes + KEY_BYTES + _STATE.size)
        if not slots:
            raise StartupError(
                f"{SIZE_FLAG} {format_size(num_bytes)} holds no block: one takes {format_size(self._slot_bytes)}",
                flag=SIZE_FLAG,
            )
        self._num_sets = max(1, slots // _PLACES)
        self._places = slots // self._num_sets
        self._set_bytes = self._places * (KEY_BYTES + _STATE.size)
        self._first_block = -(-(_PAGE + self._num_sets * self._set_bytes) // _PAGE) * _PAGE
        try:
            # Its blocks are what callers wrote: nobody else's business.
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"{FLAG} {path}: {error.strerror}", flag=FLAG) from error
        try:
            self._begin()
        except OSError as error:
            self.close()
            raise StartupError(f"{FLAG} {path}: {error.strerror}", flag=FLAG) from error
        except BaseException:
            self.close()
            raise

    @property
    def num_blocks(self) -> int:
        """Number of blocks that it has room for."""
        return self._num_sets * self._places

    def num_kept(self) -> int:
        """Number of blocks that it has. O(blocks); raises OSError."""
        kept = 0
        for number in range(self._num_sets):
            keys = os.pread(self._file, self._places * KEY_BYTES, self._set_at(number))
            kept += sum(keys[at : at + KEY_BYTES] != _NO_KEY for at in range(0, len(keys), KEY_BYTES))
        return kept

    def has(self, key: bytes) -> bool:
        """True when a block seems to be there. Raises OSError."""
        return self._place_of(key, self._set_of(key)) is not None

    def read(self, key: bytes, into: Sequence[memoryview]) -> Found:
        """Read a block into buffers, which hold anything unless it is READ. Raises OSError."""
        own = self._set_of(key)
        place = self._place_of(key, own)
        if place is None:
            return Found.ABSENT
        state_at = self._state_at(own, place)
        state = os.pread(self._file, _STATE.size, state_at)
        length = os.preadv(self._file, list(into), self._block_at(own, place))
        if len(state) == _STATE.size:
            checksum, _ = _STATE.unpack(state)
            if length == self.block_bytes and checksum == _checksum(key, into):
                self._write(_STAMP.pack(time.time_ns()), state_at + _STATE.size - _STAMP.size)
                return Found.READ
        with self._locked(own):
            # Another process may have taken the place for another block while it was read, or for this one anew.
            if self._place_of(key, own) != place or os.pread(self._file, KEY_BYTES, state_at) != state[:KEY_BYTES]:
                return Found.ABSENT
            self._write(_NO_KEY, self._key_at(own, place))
        return Found.REFUSED

    def write(self, key: bytes, block: Sequence[memoryview]) -> Written:
        """Write a block unless it is there. The block of its set that was used the longest ago gives way.

        Raises OSError; the block is then absent.
        """
        own = self._set_of(key)
        if self._place_of(key, own) is not None:
            return Written(is_new=False)
        checksum = _checksum(key, block)
        with self._locked(own):
            keys = self._keys(own)
            if _find(keys, key) is not None:
                return Written(is_new=False)
            place = _find(keys, _NO_KEY)
            evicted = place is None
            if place is None:
                place = self._oldest(own)
                # From here on the old block is absent, and the new one is not there yet.
                self._write(_NO_KEY, self._key_at(own, place))
            length = os.pwritev(self._file, list(block), self._block_at(own, place))
            if length != self.block_bytes:
                raise OSError(f"wrote {length} of {self.block_bytes} bytes")
            self._write(_STATE.pack(checksum, time.time_ns()), self._state_at(own, place))
            self._write(key, self._key_at(own, place))
        return Written(is_new=True, evicted=evicted)

    def forget(self, key: bytes) -> None:
        """Forget a block; one that is not there is fine. Raises OSError."""
        own = self._set_of(key)
        with self._locked(own):
            place = self._place_of(key, own)
            if place is not None:
                self._write(_NO_KEY, self._key_at(own, place))

    def clear(self) -> None:
        """Forget all blocks, of all processes. Raises OSError."""
        for number in range(self._num_sets):
            with self._locked(number):
                self._write(_NO_KEY * self._places, self._set_at(number))

    def close(self) -> None:
        """Close the file. Its blocks stay."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin(self) -> None:
        """Take the file as it is, or make it anew. Raises StartupError, OSError."""
        header = _HEADER.pack(_MAGIC, self.block_bytes, self._num_sets, self._places)
        header += _CHECKSUM.pack(zlib.crc32(header))
        if not self._lock(fcntl.F_WRLCK, _IN_USE):
            # Another process has it, perhaps in the middle of making it.
            self._lock(fcntl.F_RDLCK, _IN_USE, waits=True)
            if os.pread(self._file, len(header), 0) != header:
                raise StartupError(
                    f"{FLAG} {self.path} is used by a process with blocks of another size, or another {SIZE_FLAG}: "
                    "give this one a file of its own",
                    flag=FLAG,
                )
            return
        found = os.pread(self._file, len(header), 0)
        if found and found[: len(_MAGIC)] != _MAGIC:
            raise StartupError(f"{FLAG} {self.path} is there and is no file of blocks: name another one", flag=FLAG)
        if found != header:
            if found:
                _log.warning("the file of blocks has another geometry, and is made anew", path=str(self.path))
            os.ftruncate(self._file, 0)
            self._write(header, 0)
        # Places that were never written take no room on the disk. One that was cut short is as long again.
        os.ftruncate(self._file, self._first_block + self.num_blocks * self._slot_bytes)
        self._lock(fcntl.F_RDLCK, _IN_USE)

    def _set_of(self, key: bytes) -> int:
        return int.from_bytes(key[:8], "little") % self._num_sets

    def _set_at(self, number: int) -> int:
        return _PAGE + number * self._set_bytes

    def _key_at(self, own: int, place: int) -> int:
        return self._set_at(own) + place * KEY_BYTES

    def _state_at(self, own: int, place: int) -> int:
        return self._set_at(own) + self._places * KEY_BYTES + place * _STATE.size

    def _block_at(self, own: int, place: int) -> int:
        return self._first_block + (own * self._places + place) * self._slot_bytes

    def _keys(self, own: int) -> bytes:
        return os.pread(self._file, self._places * KEY_BYTES, self._set_at(own)).ljust(self._places * KEY_BYTES, b"\0")

    def _place_of(self, key: bytes, own: int) -> int | None:
        return _find(self._keys(own), key)

    def _oldest(self, own: int) -> int:
        states = os.pread(self._file, self._places * _STATE.size, self._state_at(own, 0))
        states = states.ljust(self._places * _STATE.size, b"\0")
        stamps = [stamp for _, stamp in _STATE.iter_unpack(states)]
        return stamps.index(min(stamps))

    def _write(self, data: bytes, at: int) -> None:
        if os.pwrite(self._file, data, at) != len(data):
            raise OSError(f"wrote fewer than {len(data)} bytes")

    @contextlib.contextmanager
    def _locked(self, own: int) -> Iterator[None]:
        """Keep other writers away from a set: those of other processes, and of other objects in this one."""
        # Bytes 1 .. of the locks: the sets. They need not be bytes of the file.
        with self._mutex:
            self._lock(fcntl.F_WRLCK, 1 + own, waits=True)
            try:
                yield
            finally:
                self._lock(fcntl.F_UNLCK, 1 + own)

    def _lock(self, kind: int, byte: int, *, waits: bool = False) -> bool:
        """Lock a byte. False: another one has it, and this does not wait. Raises OSError.

        The locks belong to the open file, not to the process, and end with it however it ends.
        """
        order = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK, order)
        except BlockingIOError:
            return False
        except PermissionError:
            return False
        return True


def _find(keys: bytes, key: bytes) -> int | None:
    """Return the place of a key."""
    at = keys.find(key)
    while at >= 0 and at % KEY_BYTES:
        at = keys.find(key, at + 1)
    return None if at < 0 else at // KEY_BYTES


def _checksum(key: bytes, block: Sequence[memoryview]) -> bytes:
    """Return the hash of a block and its key: a block in another one's place is no block either."""
    digest = hashlib.sha256(key)
    for part in block:
        digest.update(part)
    return digest.digest()
