"""Removes builds of the kernels that nobody has loaded for long, of whichever checkout or environment they were."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

from penstock.generation.devices.native import LIBRARY

DAY_SECONDS = 86400.0
UNUSED_DAYS = 30
_BUILD = re.compile(r"[0-9a-f]{16}")


def mark_used(library: Path) -> None:
    """Note that it was loaded, once a day, where this user may."""
    with contextlib.suppress(OSError):
        if time.time() - library.stat().st_mtime > DAY_SECONDS:
            os.utime(library)


def remove_unused(cache: Path, keep: Path) -> int:
    """Remove libraries but `keep` that were neither built nor loaded for UNUSED_DAYS, and what builds left that were
    killed, a day later; bytes that are free now. A process that has such a library loaded keeps it."""
    now = time.time()
    freed = 0
    for path in [*_builds(cache, f"{LIBRARY}-*.so"), *_builds(cache, "tmp*")]:
        days = 1 if path.is_dir() else UNUSED_DAYS
        with contextlib.suppress(OSError):
            if path != keep and now - path.stat().st_mtime > days * DAY_SECONDS:
                freed += _remove(path)
    for folder in _folders(cache):
        # Fails, as it should, where something is left in it.
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
    return size
