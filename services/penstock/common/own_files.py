"""Files of this user's cache that hold what takes long to make: each begins with a digest of its name and content.

They are no code. One that is cut short or renamed, or that another user may write, is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path

from penstock.common.kept_files import keep_last_used

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_DAY_SECONDS = 86400.0


class OwnFiles:
    """Folder of such files. Nothing about it is an error: without it the content is made again."""

    def __init__(self, root: Path, suffix: str, most: int) -> None:
        """`suffix`: of the files' names; `most`: files that are kept, those that were used last."""
        self._root = root
        self._suffix = suffix
        self._most = most

    def read(self, key: str) -> bytes | None:
        """Return the content of this name, which counts as used now; None without one."""
        path = self._root / f"{key}{self._suffix}"
        try:
            data = _read_own(path)
            if data is None:
                return None
            written, _, content = data.partition(b"\n")
            if written != _digest(key, content):
                return None
        except (OSError, ValueError):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return content

    def write(self, key: str, content: bytes) -> None:
        """Keep the content by this name, and remove files beyond the most, and what killed writers have left."""
        with contextlib.suppress(OSError):
            self._root.mkdir(parents=True, exist_ok=True)
            # With rights for this user alone.
            descriptor, name = tempfile.mkstemp(dir=self._root, prefix="tmp")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_digest(key, content) + b"\n" + content)
                Path(name).replace(self._root / f"{key}{self._suffix}")
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
            self._remove()

    def _remove(self) -> None:
        keep_last_used(self._root, f"*{self._suffix}", self._most)
        for path in self._root.glob("tmp*"):
            if time.time() - path.stat().st_mtime > _DAY_SECONDS:
                path.unlink(missing_ok=True)


def _read_own(path: Path) -> bytes | None:
    """Read a file, no link, that nobody but this user and root may write; None for another. Raises OSError."""
    # What is looked at is what is read, and a pipe of this name is not waited for.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.geteuid())
        return file.read() if is_own and not found.st_mode & _OTHERS_WRITE else None


def _digest(key: str, content: bytes) -> bytes:
    """Digest that a file begins with: of its name, too, since one that was renamed is of something else."""
    digest = hashlib.sha256(key.encode() + b"\0")
    digest.update(content)
    return digest.hexdigest().encode()
