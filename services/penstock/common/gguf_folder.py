"""A GGUF file as a model folder in the cache: config.json and tokenizer from its metadata, beside a link to it.

It is made once for each file (its path, size and modification time), or once for all parts of a split one; services
read it like any other folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.common.dtypes import BY_STORED, COMPUTED
from penstock.common.environment import cache_folder, child_environment
from penstock.common.errors import StartupError
from penstock.common.gguf_architectures import architecture_of, config_fields
from penstock.common.gguf_facts import MOST_WHOLE
from penstock.common.gguf_file import GgufFile
from penstock.common.gguf_parts import GGUF_FILE, link_parts, named_parts, read_gguf, whole_name
from penstock.common.logging import get_logger

# Raise it when the contents of the folder change.
_VERSION = 2
_TOKENIZER_SECONDS = 300
# Most characters of a file's name in its folder's name.
_STEM_CHARS = 100
_log = get_logger("penstock.common")


def gguf_folder(path: Path) -> Path:
    """Return the folder of a file; make it if it does not exist. Another process that makes it is waited for.

    Raises StartupError naming MODEL for a broken file, an unsupported architecture or type, or a cache that cannot be
    written.
    """
    path = path.absolute()
    folder = made_folder(path)
    if folder is not None:
        return folder
    config = config_of(read_gguf(path))
    target = _place(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_process(target):
            if (folder := made_folder(path)) is not None:
                return folder
            scratch = Path(tempfile.mkdtemp(prefix=".gguf-", dir=target.parent))
            try:
                _fill(scratch, path, config)
                # Without locks, another process may have made it meanwhile.
                with contextlib.suppress(OSError):
                    os.replace(scratch, target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise StartupError(
            f"MODEL {path}: {target.parent}, the place for its config.json, cannot be written ({error.strerror}): "
            "set XDG_CACHE_HOME to a folder that can",
            flag="MODEL",
        ) from error
    return target


def _fill(folder: Path, path: Path, config: dict[str, Any]) -> None:
    """Write what a model folder has. Raises OSError."""
    _write_tokenizer(path, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    link_parts(path, folder)


@contextlib.contextmanager
def _only_process(target: Path) -> Iterator[None]:
    """Lock the place of a folder: a tokenizer service and a generation service that start together convert one
    vocabulary once. The lock ends with its process; a cache that cannot be locked has none."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            descriptor = os.open(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def made_folder(path: Path) -> Path | None:
    """Return the folder of a file; None if it does not exist."""
    folder = _place(path.absolute())
    return folder if (folder / GGUF_FILE).exists() else None


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return config.json's values. Raises StartupError naming a missing or unsupported fact of the file."""
    config = config_fields(file, architecture_of(file))
    ends = [file.whole(f"tokenizer.ggml.{one}_token_id", most=MOST_WHOLE) for one in ("eos", "eot", "eom")]
    config["eos_token_id"] = list(dict.fromkeys(one for one in ends if one is not None))
    config["bos_token_id"] = file.whole("tokenizer.ggml.bos_token_id", most=MOST_WHOLE)
    config["pad_token_id"] = None
    types = [tensor.type.name for tensor in file.tensors.values()]
    counts = {one: types.count(one) for one in sorted(set(types))}
    kinds = [one for one in counts if one != "F32"] or ["F32"]
    # Numbers that are made of blocks have no dtype of their own.
    stored = BY_STORED.get(kinds[0]) if len(kinds) == 1 else None
    config["dtype"] = stored.name if stored is not None and stored.name in COMPUTED else "bfloat16"
    config["quantization_config"] = {"quant_method": "gguf", "types": counts}
    return config


def _place(path: Path) -> Path:
    key = f"{_VERSION}"
    for part in named_parts(path):
        real = part.resolve()
        # Reading reports a part that is missing.
        facts = real.stat() if real.exists() else None
        key += f" {real} {facts and facts.st_size} {facts and facts.st_mtime_ns}"
    name = whole_name(path)[:_STEM_CHARS]
    return Path(cache_folder()) / "gguf" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _write_tokenizer(path: Path, folder: Path) -> None:
    """Write tokenizer.json and its settings in a child process, since that takes memory. Without them a service asks
    for another folder with the tokenizer."""
    command = [sys.executable, "-m", "penstock.common.gguf_tokenizer", str(path), str(folder)]
    try:
        done = subprocess.run(
            command, env=child_environment(), capture_output=True, timeout=_TOKENIZER_SECONDS, check=False, text=True
        )
        lines = done.stderr.strip().splitlines()
        cause = "" if done.returncode == 0 else (lines or [f"status {done.returncode}"])[-1]
    except (OSError, subprocess.SubprocessError) as error:
        cause = type(error).__name__
    if cause:
        for left in folder.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()
        _log.warning(
            "the GGUF file's tokenizer cannot be converted: give a folder with a tokenizer as --tokenizer-path",
            cause=cause[:300],
        )
