"""A GGUF model in one file, or in parts named NAME-00001-of-00003.gguf, as llama.cpp's `llama-gguf-split` writes them.

The first part has the facts; each has tensors of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from penstock.common.gguf_file import GgufFile

SUFFIX = ".gguf"
# Name of the first file, or of its link, in a model folder; further parts are named after it.
GGUF_FILE = "model.gguf"
_NUMBER, _COUNT = "split.no", "split.count"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})")
# The names have five digits.
_MOST_PARTS = 99_999


def part_name(stem: str, number: int, count: int) -> str:
    """Return the name of part `number`, from 1 on."""
    return f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}"


def whole_name(path: Path) -> str:
    """Return the name of the model that a file belongs to, without suffix and number."""
    match = _PART.fullmatch(path.stem)
    return path.stem if match is None else match["stem"]


def first_of(paths: Sequence[Path]) -> Path | None:
    """Return the first part if these are the parts of one model, else None."""
    parts = [(path, _PART.fullmatch(path.stem)) for path in paths]
    if len({None if match is None else (match["stem"], match["count"]) for _, match in parts}) != 1:
        return None
    return next((path for path, match in parts if match is not None and int(match["number"]) == 1), None)


def named_parts(path: Path) -> list[Path]:
    """Return the files of a model by the name of its first one; not all of them need exist."""
    match = _PART.fullmatch(path.stem)
    if match is None:
        return [path]
    count = int(match["count"])
    return [path, *(path.with_name(part_name(match["stem"], one, count)) for one in range(2, count + 1))]


def existing_parts(path: Path) -> list[Path]:
    """Return those of `named_parts` that are there, if only as a link."""
    return [part for part in named_parts(path) if os.path.lexists(part)]


def linked_parts(folder: Path) -> list[Path]:
    """Return the links in a model folder to the files of its model."""
    return [folder / GGUF_FILE, *sorted(folder.glob(f"{Path(GGUF_FILE).stem}-*{SUFFIX}"))]


def link_parts(path: Path, folder: Path) -> None:
    """Link the files of a model into a folder, where `read_gguf(folder / GGUF_FILE)` reads them."""
    for number, part in enumerate(parts := named_parts(path), start=1):
        name = GGUF_FILE if number == 1 else part_name(Path(GGUF_FILE).stem, number, len(parts))
        (folder / name).symlink_to(part.resolve())


def read_gguf(path: Path) -> GgufFile:
    """Read the headers of a model's files, `path` being the first.

    Raises StartupError naming the file that is missing, broken or of another model.
    """
    first = GgufFile(path)
    count = first.whole(_COUNT, 1, most=_MOST_PARTS) or 1
    if count == 1:
        return first
    stem = Path(GGUF_FILE).stem if path.name == GGUF_FILE else whole_name(path)
    if number := first.whole(_NUMBER, 0):
        raise first.error(f"is part {number + 1} of {count}: give the first, {part_name(stem, 1, count)}")
    if path.name not in (GGUF_FILE, part_name(stem, 1, count)):
        raise first.error(f"is part 1 of {count}, and they are found by their names: call it NAME-00001-of-{count:05d}")
    for number in range(2, count + 1):
        name = part_name(stem, number, count)
        if not path.with_name(name).exists():
            raise first.error(f"is part 1 of {count}, and {name} is not beside it")
        part = GgufFile(path.with_name(name))
        if (part.whole(_NUMBER), part.whole(_COUNT)) != (number - 1, count):
            raise part.error(f"is not part {number} of {count} by its facts {_NUMBER} and {_COUNT}")
        if twice := first.tensors.keys() & part.tensors.keys():
            raise part.error(f"has a tensor of another part: {min(twice)[:80]}")
        first.tensors |= part.tensors
    total = first.whole("split.tensors.count")
    if total is not None and total != len(first.tensors):
        raise first.error(f"has split.tensors.count {total}, and its parts have {len(first.tensors)} tensors")
    return first
