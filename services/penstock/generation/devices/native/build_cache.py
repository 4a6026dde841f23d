"""Removes builds of the kernels that were not loaded for a long time, from any checkout or environment."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

from penstock.generation.devices.native import LIBRARY
from penstock.generation.devices.native.trust import digest_path

DAY_SECONDS = 86400.0
UNUSED_DAYS = 30
_BUILD = re.compile(r"[0-9a-f]{16}")


def mark_used(library: Path) -> None:
    """Note that the library was loaded: once a day, and only where this user may write."""
    with contextlib.suppress(OSError):
        if time.time() - library.stat().st_mtime > DAY_SECONDS:
            os.utime(library)


def remove_unused(cache: Path, keep: Path) -> int:
    """Remove libraries that were neither built nor loaded for UNUSED_DAYS, except `keep`; return the freed bytes.

    Remains of killed builds are removed after a day. A process that has loaded a removed library keeps it.
    """
    now = time.time()
    freed = 0
    for path in [*_builds(cache, f"{LIBRARY}-*.so"), *_builds(cache, "tmp*")]:
        days = 1 if path.is_dir() else UNUSED_DAYS
        with contextlib.suppress(OSError):
            if path != keep and now - path.stat().st_mtime > days * DAY_SECONDS:
                freed += _remove(path)
    for folder in _folders(cache):
        # It fails, as it should, where something is left in the folder.
        with contextlib.suppress(OSError):
            folder.rmdir()
    return freed


def _folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if _BUILD.fullmatch(path.name)]


def _builds(cache: Path, pattern: str) -> list[Path]:
    return [path for folder in _folders(cache) for path in folder.glob(pattern)]


def _remove(path: Path) -> int:
    if path.is_dir():
        size = sum(file.stat().st_size for file in path.iterdir())
        shutil.rmtree(path)
        return size
    size = path.stat().st_size
    path.unlink()
    digest_path(path).unlink(missing_ok=True)
    return size
