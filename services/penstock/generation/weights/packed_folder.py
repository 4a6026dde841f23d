"""The folder that `penstock pack` writes: a service never sees a half-written file under a name that it reads."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.common.errors import StartupError
from penstock.generation.weights.files import INDEX_FILE, is_packed

# Files with the terms of use of the model.
_LICENCES = ("LICENSE*", "NOTICE*")
# Vocabularies and templates under names of their own.
_NAMED = (
    "chat_template.jinja",
    "chat_templates/*.jinja",
    "additional_chat_templates/*.jinja",
    "merges.txt",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
)
# All files that a service reads besides the weights, and more.
_SIDE_FILES = ("*.json", "*.jinja", *_NAMED, *_LICENCES)
# Files of an earlier model that a service would take for this model's. All other files belong to the user.
_MISTAKABLE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    *_NAMED,
)
_UNFINISHED = ".penstock-pack-"


@contextmanager
def unfinished(folder: Path, output: Path, *, force: bool) -> Iterator[Path]:
    """Yield a folder inside `output`, on the same file system, for files to be renamed into `output`; remove it in the
    end.

    Raises StartupError when `output` must not be written into, OSError when it cannot be.
    """
    is_new = not output.exists()
    if output.exists() and not output.is_dir():
        raise StartupError(f"OUTPUT {output} is a file; expected a folder", flag="OUTPUT")
    if not is_new and output.resolve() == folder.resolve():
        raise StartupError("OUTPUT is the folder of MODEL: packed weights have one of their own", flag="OUTPUT")
    if not is_new and not force and any(output.iterdir()):
        raise StartupError(f"OUTPUT {output} is not empty: --force replaces the model in it", flag="OUTPUT")
    output.mkdir(parents=True, exist_ok=True)
    for left in output.glob(f"{_UNFINISHED}*"):
        # A run that was killed left it.
        shutil.rmtree(left)
    scratch = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=output))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if is_new:
            # Still empty: the run failed.
            with contextlib.suppress(OSError):
                output.rmdir()


def copy_side_files(folder: Path, scratch: Path, output: Path) -> None:
    """Copy the side files of `folder` to `output` by way of `scratch`; remove those that an earlier model left in
    `output`."""
    ours = _found(folder, _SIDE_FILES)
    theirs = _found(output, (*_MISTAKABLE, *_LICENCES) if is_packed(output) else _MISTAKABLE)
    for name in ours:
        (scratch / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / name, scratch / name)
        sync(scratch / name)
    for name in ours:
        (output / name).parent.mkdir(exist_ok=True)
        os.replace(scratch / name, output / name)
    for name in set(theirs) - set(ours):
        (output / name).unlink()


def sync(path: Path) -> None:
    """Wait until everything written to the file, or renamed into the folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _found(folder: Path, patterns: Iterable[str]) -> list[str]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in found if path.name != INDEX_FILE)
