"""The cache of importance has a bound: the files that were used last stay."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from penstock.generation.core.model_config import CONFIG_FILE
from penstock.generation.models.importance_cache import kept
from torch import Tensor


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps({"model_type": folder.name}))
    return folder


def test_the_files_that_were_used_last_stay(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    measured: list[str] = []

    def take(folder: Path) -> dict[str, Tensor]:
        def measure() -> dict[str, Tensor]:
            measured.append(folder.name)
            return {"a": torch.ones(3)}

        return kept(folder, cache, torch.float32, measure, most_files=2)

    first, second, third = (checkpoint(tmp_path / name) for name in ("first", "second", "third"))
    for folder in (first, second):
        take(folder)
        for path in cache.glob("*.safetensors"):
            # As if some time had passed.
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
    # It is used once more, and the second is the oldest then.
    take(first)
    take(third)
    assert measured == ["first", "second", "third"]
    assert len(list(cache.glob("*.safetensors"))) == 2
    take(first)
    take(third)
    assert len(measured) == 3
    take(second)
    assert measured[3:] == ["second"]
