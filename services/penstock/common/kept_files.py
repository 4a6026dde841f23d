"""Cache folders: the files that were used last are kept."""

from __future__ import annotations

import contextlib
from pathlib import Path


def keep_last_used(folder: Path, pattern: str, most: int) -> None:
    """Remove the files of a pattern that were not used for the longest time, beyond `most`.

    Another process may do the same. A file that cannot be removed stays.
    """
    used: list[tuple[float, Path]] = []
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            used.append((path.stat().st_mtime, path))
    used.sort(reverse=True)
    for _, path in used[most:]:
        with contextlib.suppress(OSError):
            path.unlink()
