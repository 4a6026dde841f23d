"""Files of the importance of inputs (input_importance.py), one a checkpoint and dtype: later starts measure nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.common.kept_files import keep_last_used
from penstock.common.logging import get_logger
from penstock.generation.core.model_config import CONFIG_FILE
from penstock.generation.models.input_importance import NUM_IDS, SEED, SEQUENCE

_log = get_logger("penstock.generation")
# Raise it when the same checkpoint would get other numbers.
_VERSION = 1
# Files that are kept: those that were used last. No option: a file has as many numbers as a checkpoint has inputs, a
# MiB or two for billions of weights, so that all of them fill no disk, and one that has gone is measured again.
_MOST_FILES = 32


def kept(
    folder: Path,
    cache: Path,
    dtype: torch.dtype,
    measure: Callable[[], dict[str, Tensor]],
    *,
    most_files: int = _MOST_FILES,
) -> dict[str, Tensor]:
    """Return the importance of the checkpoint in `folder` in a model of `dtype`: from the folder `cache`, or by
    `measure`, which is kept there. A file that cannot be read or written is no error."""
    path = cache / f"{_key(folder, dtype)}.safetensors"
    try:
        found = load_file(path)
    except (OSError, SafetensorError):
        pass
    else:
        with contextlib.suppress(OSError):
            os.utime(path)
        return found
    _log.info("measuring the importance of inputs for int4; later starts find it in the cache", ids=NUM_IDS)
    begin = time.monotonic()
    found = measure()
    _log.info("measured the importance of inputs", seconds=round(time.monotonic() - begin, 1))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            save_file(found, Path(scratch) / path.name)
            os.replace(Path(scratch) / path.name, path)
    except (OSError, SafetensorError) as error:
        # A full disk is an error of safetensors.
        _log.warning("the importance of inputs cannot be kept", cause=str(error))
        return found
    keep_last_used(cache, "*.safetensors", most_files)
    return found


def _key(folder: Path, dtype: torch.dtype) -> str:
    """Return a digest of the folder's path, configuration, and names, sizes and times of its weights, and of the dtype:
    int4's numbers must not depend on which start came first."""
    digest = hashlib.sha256(repr((_VERSION, NUM_IDS, SEQUENCE, SEED, str(folder.resolve()), str(dtype))).encode())
    digest.update((folder / CONFIG_FILE).read_bytes())
    for path in sorted(folder.iterdir()):
        # A link that leads nowhere is no weight: the loader reports those that it needs.
        if path.suffix in (".safetensors", ".gguf") and path.exists():
            state = path.stat()
            digest.update(repr((path.name, state.st_size, state.st_mtime_ns)).encode())
    return digest.hexdigest()[:32]
