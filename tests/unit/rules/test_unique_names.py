"""A file and a class of the services have names of their own, so that a name alone finds them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from factories.source_tree import PACKAGE, STUBS

# Names that several files have, each with the reason: they do the same thing, each in its own room.
FILES_ALIKE = {
    "app": "one process: one for each service",
    "base": "contracts that the other files of its folder keep",
    "chat": "a file of the command line is named by its command",
    "command": "the command of a folder of the command line",
    "config": "options of one process, or of the engine",
    "convert": "messages to plain data and back, for one process",
    "cuda": "a GPU's part of devices, and of attention",
    "fp8": "one number format: in memory, and as it is published",
    "health": "a file of the command line is named by its command",
    "metrics": "metrics of one process, and what they share",
    "native": "the kernels' part of attention, and of linear layers",
    "npu": "an NPU's part of devices, and of attention",
    "pack": "a file of the command line is named by its command",
    "server": "http2 is a library of its own",
    "service": "loaded state below the RPCs of one process",
    "servicer": "RPCs of one process",
    "table": "the one table of its folder",
    "watermark": "a file of the command line is named by its command",
}
CLASSES_ALIKE: Mapping[str, str] = {}


def files() -> dict[str, str]:
    """Path in the package -> text of every file that is written by hand."""
    paths = (path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")))
    written = (path for path in paths if path.parts[0] not in STUBS and path.name != "__init__.py")
    return {path.as_posix(): (PACKAGE / path).read_text(encoding="utf-8") for path in written}


def repeated(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def file_names(found: Mapping[str, str]) -> list[str]:
    return [path.rpartition("/")[2].removesuffix(".py") for path in found]


def class_names(found: Mapping[str, str]) -> list[str]:
    return [name for text in found.values() for name in re.findall(r"^class (\w+)", text, re.MULTILINE)]


def test_a_files_name_is_its_own_or_listed_with_a_reason() -> None:
    assert repeated(file_names(files())) == FILES_ALIKE.keys()


def test_a_classs_name_is_its_own_or_listed_with_a_reason() -> None:
    assert repeated(class_names(files())) == CLASSES_ALIKE.keys()


@pytest.mark.parametrize(
    "found", [{"a/one.py": "class A:", "b/one.py": "class B:"}, {"a/one.py": "class A:", "b/two.py": "\nclass A(B):"}]
)
def test_a_repeated_name_would_be_seen(found: dict[str, str]) -> None:
    assert len(repeated(file_names(found)) | repeated(class_names(found))) == 1
