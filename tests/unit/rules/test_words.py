"""Names and docstrings keep to the words of docs/learn/glossary.md."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "services" / "penstock"
GLOSSARY = ROOT / "docs" / "learn" / "glossary.md"
FOLDERS = ("services", "clients", "tests")
# A docstring names its subject first, as a verb or a noun.
QUESTION = re.compile(r"(What|Who|Whose|Whether|Where|Which|How|Those)\b")
# Words that no file, class or function has in its name, alone or as a part.
NOWHERE = {"emitter", "farewell", "footprint", "guides", "least_bytes", "outbox", "turnstile"}
# Whole names of classes: as a part of a longer name, or of a function's, these words are plain English.
CLASSES = {"draft_order", "leave", "live_request", "stages", "time_limits", "trail"}
# Whole names of files.
FILES = {"early", "healed", "healing", "leave", "read_ahead", "stages", "trail", "unused"}
KERNEL_FILES = {"ahead", "few", "largest", "pairs", "scan", "team"}
# No file or class begins with this one.
PREFIX = "given"
# The room in which `watermark` once named the blocks that admission leaves free.
ENGINE = ("services/penstock/generation/engine/", "tests/unit/generation/engine/")
# config.py, app.py and their like: names that a reader finds more than twice in the package.
MOST_COMMON_NAMES = 9


@cache
def sources() -> dict[str, str]:
    """Path -> text of every Python file that is written by hand, or made from one that is."""
    found = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in found if "v1" not in path.parts}


def snake(name: str) -> str:
    """Return `LiveRequest` and `_live_request` as `live_request`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).strip("_").lower()


def is_retired(name: str, wholes: set[str]) -> bool:
    """True when the snake-case `name` is one of `wholes`, or has a word of NOWHERE as a part."""
    return name in wholes or any(re.search(rf"(^|_){word}(_|$)", name) for word in NOWHERE)


def retired_in(path: str, source: str) -> Iterator[str]:
    """Yield the names of a Python file, its own included, that have a retired word."""
    file = snake(Path(path).stem).removeprefix("test_")
    if is_retired(file, FILES) or re.match(rf"{PREFIX}(_|$)", file):
        yield path
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = snake(node.name)
            is_class = isinstance(node, ast.ClassDef)
            if (
                is_retired(name, CLASSES if is_class else set())
                or (is_class and re.match(rf"{PREFIX}(_|$)", name))
                or ("watermark" in name and path.startswith(ENGINE))
            ):
                yield f"{path}:{node.lineno} {node.name}"


def questions_in(path: str, source: str) -> Iterator[str]:
    """Yield the places of docstrings that begin like a question."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if QUESTION.match(text):
                yield f"{path}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    products = {path: text for path, text in sources().items() if not path.startswith("tests/")}
    assert not [place for path, text in products.items() for place in questions_in(path, text)]


def test_retired_words_are_in_no_name() -> None:
    assert not [place for path, text in sources().items() for place in retired_in(path, text)]


def test_retired_words_name_no_file_of_the_kernels() -> None:
    kernels = {path.stem for path in PACKAGE.rglob("csrc/**/*") if path.suffix in {".h", ".cpp"}}
    assert "linear" in kernels
    assert not kernels & KERNEL_FILES


def test_few_file_names_occur_more_than_twice() -> None:
    files = (Path(path).name for path in sources() if path.startswith("services/penstock/"))
    counts = Counter(name for name in files if name != "__init__.py")
    common = sorted(name for name, count in counts.items() if count > 2)
    assert len(common) <= MOST_COMMON_NAMES, common


@pytest.mark.parametrize("word", sorted(NOWHERE | CLASSES | FILES | KERNEL_FILES | {PREFIX}))
def test_the_glossary_gives_the_successor_of_a_retired_word(word: str) -> None:
    _, _, section = GLOSSARY.read_text(encoding="utf-8").partition("## Retired words")
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    assert any(word in map(snake, re.findall(r"`(\w+)`", cells[1])) and cells[2].strip() for cells in rows)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("services/penstock/router/turnstile.py", ""),
        ("services/penstock/generation/given.py", ""),
        ("clients/python/_given_texts.py", ""),
        ("tests/unit/test_healing.py", ""),
        ("services/a.py", "class LiveRequest: ..."),
        ("services/a.py", "class Stages: ..."),
        ("services/a.py", "async def _say_farewell(): ..."),
        ("services/a.py", "class SessionOutbox: ..."),
        ("services/penstock/generation/engine/a.py", "def watermark_blocks(): ..."),
    ],
)
def test_a_retired_word_would_be_seen(path: str, source: str) -> None:
    assert len(list(retired_in(path, source))) == 1


@pytest.mark.parametrize("source", ["def leave(): ...", "class EarlyStopping: ...", "def live_requests(): ..."])
def test_plain_english_is_let_pass(source: str) -> None:
    assert not list(retired_in("services/token_healing.py", source))


@pytest.mark.parametrize("source", ['"""What it is."""', 'def f():\n    """Whether it runs."""'])
def test_a_question_would_be_seen(source: str) -> None:
    assert len(list(questions_in("services/a.py", source))) == 1
