"""Builds of the kernels that are no longer used are removed, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

from penstock.generation.devices.native.build_cache import DAY_SECONDS, UNUSED_DAYS, mark_used, remove_unused

OLD = UNUSED_DAYS + 1


def made(path: Path, *, days: float) -> Path:
    """A file that was last used so many days ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"12345")
    aged(path, days)
    return path


def aged(path: Path, days: float) -> None:
    then = time.time() - days * DAY_SECONDS
    os.utime(path, (then, then))


def test_only_builds_that_were_not_used_for_long_are_removed(tmp_path: Path) -> None:
    name = "penstock_native-00.so"
    ours = made(tmp_path / ("a" * 16) / name, days=OLD)
    old = made(tmp_path / ("b" * 16) / name, days=OLD)
    kept = [
        ours,
        made(tmp_path / ("c" * 16) / name, days=UNUSED_DAYS - 1),
        made(tmp_path / ("d" * 16) / "model.safetensors", days=OLD),
        made(tmp_path / "models" / name, days=OLD),
        made(tmp_path / "demo.gguf", days=OLD),
    ]
    assert remove_unused(tmp_path, ours) == 5
    assert not old.parent.exists()
    assert all(path.exists() for path in kept)
    assert remove_unused(tmp_path, ours) == 0


def test_what_a_killed_build_left_is_removed_a_day_later(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 16)
    left, running = (made(folder / name / "rows.o", days=2).parent for name in ("tmp1", "tmp2"))
    aged(left, 2)
    assert remove_unused(tmp_path, folder / "penstock_native-00.so") == 5
    assert not left.exists()
    assert running.exists()


def test_a_library_that_is_loaded_counts_as_used(tmp_path: Path) -> None:
    library = made(tmp_path / ("b" * 16) / "penstock_native-00.so", days=OLD)
    mark_used(library)
    assert remove_unused(tmp_path, tmp_path / "other") == 0
    assert library.exists()
