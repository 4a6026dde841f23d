"""Trust in a built library: loading one runs its code with all rights of this process.

Anyone who may write the file, or a folder from it up to the cache, could have replaced it. So all of them must belong
to this user, to root, or to the owner of the installed torch, which runs in this process anyway, and be writable for no
other; and the file must match the digest that the build wrote beside it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
from pathlib import Path

import torch

from penstock.common.errors import StartupError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def obstacle(library: Path, cache: Path) -> str | None:
    """Return the reason not to load `library`, a file within a folder of `cache`; None: it may be loaded."""
    for path in (cache, library.parent, library):
        try:
            # A cache may be a link that its user made; its content is never one.
            found = path.stat() if path == cache else path.lstat()
        except OSError as error:
            return f"{path}: {error.strerror}"
        if stat.S_ISLNK(found.st_mode):
            return f"{path} is a link"
        if found.st_uid not in _owners():
            return f"{path} belongs to another user"
        if found.st_mode & _OTHERS_WRITE:
            return f"others may write {path}"
    try:
        recorded = digest_path(library).read_text(errors="replace")
        present = digest(library)
    except OSError as error:
        return f"{library} or its digest cannot be read: {error.strerror}"
    # One that is cut short would end this process when it is loaded, or later when a page of it is used.
    return None if recorded == present else f"{library} is not what was built"


def digest_path(library: Path) -> Path:
    """Return the file that has the digest of `library`."""
    return library.with_suffix(".digest")


def digest(library: Path) -> str:
    """Return the digest of a library's bytes."""
    with library.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def protect(cache: Path, folder: Path) -> None:
    """Make `cache` and `folder` within it, writable for this user only. Raises StartupError if that is impossible."""
    cache.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    for path in (cache, folder):
        found = path.stat() if path == cache else path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in _owners():
            raise StartupError(
                f"the native kernels cannot be built: {path} belongs to another user, or is no folder; remove it, or "
                "set XDG_CACHE_HOME",
                flag="--kernels",
            )
        if found.st_mode & _OTHERS_WRITE:
            try:
                path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)
            except OSError as error:
                raise StartupError(
                    f"the native kernels cannot be built: others may write {path} ({error.strerror}); set "
                    "XDG_CACHE_HOME to a folder of this user",
                    flag="--kernels",
                ) from error


@functools.cache
def _owners() -> frozenset[int]:
    return frozenset((0, os.geteuid(), Path(torch.__file__).stat().st_uid))
