"""Names and docstrings keep to the words of docs/learn/glossary.md, and to plain English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from factories.source_tree import FOREIGN, rooms

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "services" / "penstock"
GLOSSARY = ROOT / "docs" / "learn" / "glossary.md"
FOLDERS = ("services", "clients", "tests", "tools", "dev", "benchmarks")
# A docstring names its subject first, as a verb or a noun.
QUESTION = re.compile(r"(What|Who|Whose|Whether|Where|Which|How|Those)\b")
# A string that may be such a docstring, and definitions: what has neither need not be parsed.
_QUOTED_QUESTION = re.compile(r"""["'][\s\\]*""" + QUESTION.pattern)
_DEFINITION = re.compile(r"\b(?:class|def)\s+(\w+)")
# What "where" may say in the glossary's table of retired words.
WHERE = {"names", "classes", "files", "beginnings", "engine", "csrc"}
ENGINE = ("services/penstock/generation/engine/", "tests/unit/generation/engine/")
PLAIN = ("services/", "clients/", "protos/", "tools/")


@cache
def sources() -> dict[str, str]:
    """Path -> text of every Python file that is written by hand, or made from one that is."""
    found = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    written = (path for path in found if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in written}


@cache
def snake(name: str) -> str:
    """Return `LiveRequest` and `_live_request` as `live_request`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).strip("_").lower()


def retired_rows() -> Iterator[tuple[list[str], set[str], str]]:
    """Yield the rows of the glossary's table: words in snake case, where they are retired, and what to say."""
    _, _, section = GLOSSARY.read_text(encoding="utf-8").partition("## Retired words")
    rows = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("| ")]
    for retired, where, say in rows[1:]:
        yield [snake(word) for word in re.findall(r"`(\w+)`", retired)], set(where.strip().split(", ")), say.strip()


@cache
def retired(where: str) -> frozenset[str]:
    """Return the words that the glossary retires there."""
    return frozenset(word for words, places, _ in retired_rows() if where in places for word in words)


@cache
def pattern(where: str, before: str) -> re.Pattern[str]:
    """Compile a pattern of the words that the glossary retires there, behind `before`."""
    return re.compile(rf"{before}(?:{'|'.join(sorted(retired(where)))})(?:_|$)")


def has_part(name: str, where: str) -> bool:
    """True when the snake-case `name` has a word as a part that is retired there."""
    return bool(pattern(where, "(?:^|_)").search(name))


def begins_retired(name: str) -> bool:
    return bool(pattern("beginnings", "").match(name))


def retired_in(path: str, source: str) -> Iterator[str]:
    """Yield the names of a Python file, its own included, that have a retired word."""
    file = snake(Path(path).stem).removeprefix("test_")
    in_engine = path.startswith(ENGINE)
    is_whole = file in retired("files")
    if is_whole or begins_retired(file) or has_part(file, "names") or (in_engine and has_part(file, "engine")):
        yield path

    def is_retired(name: str, is_class: bool) -> bool:
        return (
            has_part(name, "names")
            or (is_class and (name in retired("classes") or begins_retired(name)))
            or (in_engine and has_part(name, "engine"))
        )

    if not any(is_retired(snake(name), is_class=True) for name in _DEFINITION.findall(source)):
        return
    for node in ast.walk(ast.parse(source)):
        is_class = isinstance(node, ast.ClassDef)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and is_retired(
            snake(node.name), is_class
        ):
            yield f"{path}:{node.lineno} {node.name}"


def questions_in(path: str, source: str) -> Iterator[str]:
    """Yield the places of docstrings that begin like a question."""
    if not _QUOTED_QUESTION.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if QUESTION.match(text):
                yield f"{path}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}"


def foreign_in(path: str, text: str) -> Iterator[str]:
    """Yield the places of phrases that are not plain English."""
    for found in FOREIGN.finditer(text):
        yield f"{path}:{text.count(chr(10), 0, found.start()) + 1} {found[0]}"


def test_texts_are_in_plain_english() -> None:
    found = {path: text for path, text in sources().items() if path.startswith(PLAIN)}
    others = (
        path for folder in PLAIN for path in (ROOT / folder).rglob("*") if path.suffix in {".h", ".cpp", ".proto"}
    )
    found |= {path.relative_to(ROOT).as_posix(): path.read_text() for path in others}
    assert len(found) > 500
    assert not [place for path, text in found.items() for place in foreign_in(path, text)]


def test_they_are_found_across_lines() -> None:
    assert list(foreign_in("x.py", "one\n# kept so\n# many seconds")) == ["x.py:2 so\n# many"]
    assert len(list(foreign_in("x.py", "a call whose end is near, of which so many exist"))) == 3


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert not [place for path, text in sources().items() for place in questions_in(path, text)]


def test_retired_words_are_in_no_name() -> None:
    assert not [place for path, text in sources().items() for place in retired_in(path, text)]


def test_retired_words_name_no_file_of_the_kernels() -> None:
    kernels = {path.stem for path in PACKAGE.rglob("csrc/**/*") if path.suffix in {".h", ".cpp"}}
    assert "linear" in kernels
    assert not kernels & retired("csrc")


@cache
def homes() -> dict[str, tuple[str, ...]]:
    """Word -> the rooms with names that may have it, from the glossary's table of words with a home."""
    _, _, section = GLOSSARY.read_text(encoding="utf-8").partition("## Words with a home")
    rows = re.findall(r"^\| (`.+) \| (`.+) \|$", section.partition("\n## ")[0], re.MULTILINE)
    return {
        word: tuple(re.findall(r"`([\w.]+)`", allowed))
        for words, allowed in rows
        for word in re.findall(r"`(\w+)`", words)
    }


def homeless_in(path: str, source: str) -> Iterator[str]:
    """Yield the names of a file of the package and of its classes that have a word of another room."""
    module = path.removeprefix("services/penstock/").removesuffix(".py").replace("/", ".") + "."
    for name in (Path(path).stem, *re.findall(r"^ *class (\w+)", source, re.MULTILINE)):
        parts = {one.removesuffix("s") for one in snake(name).split("_")}
        for word, allowed in homes().items():
            if word in parts and not any(module.startswith(room + ".") for room in allowed):
                yield f"{path} {name}: {word}"


def test_words_with_a_home_name_nothing_elsewhere() -> None:
    inside = {path: source for path, source in sources().items() if path.startswith("services/penstock/")}
    assert not [found for path, source in inside.items() for found in homeless_in(path, source)]


def test_homes_are_rooms_with_files_that_have_the_word() -> None:
    assert len(homes()) > 10
    named = {room.name for room in rooms()}
    assert not {room for allowed in homes().values() for room in allowed} - named
    for word, places in homes().items():
        folders = [f"services/penstock/{room.replace('.', '/')}/" for room in places]
        assert all(
            any(word in text.lower() for path, text in sources().items() if path.startswith(one)) for one in folders
        )


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("services/penstock/gateway/admission.py", ""),
        ("services/penstock/generation/parallel/launch.py", "class RankPlaces: ..."),
        ("services/penstock/generation/runner/a.py", "class FusedStep: ..."),
    ],
)
def test_a_word_away_from_home_would_be_seen(path: str, source: str) -> None:
    assert len(list(homeless_in(path, source))) == 1


def test_every_row_of_retired_words_says_where_and_what_instead() -> None:
    rows = list(retired_rows())
    assert len(rows) > 25
    assert [row for row in rows if not (row[0] and row[1] and row[1] <= WHERE and row[2])] == []
    assert all(retired(where) for where in WHERE)


def missing_names(wanted: set[str]) -> set[str]:
    """Return those that are no name in the package's code, nor of its files, nor a word of the kernels."""
    missing = set(wanted)
    for path in PACKAGE.rglob("csrc/**/*"):
        if path.suffix in {".h", ".cpp"}:
            missing -= {path.stem, *re.findall(r"\w+", path.read_text())}
    inside = {path: source for path, source in sources().items() if path.startswith("services/")}
    missing -= {Path(path).stem for path in inside}
    for source in inside.values():
        if any(name in source for name in missing):
            for node in ast.walk(ast.parse(source)):
                missing -= {getattr(node, field, None) for field in ("name", "id", "attr", "arg")}
    return missing


def test_the_successors_that_are_code_exist() -> None:
    told = {name for _, _, said in retired_rows() for name in re.findall(r"`(\w+)`", said)}
    assert len(told) > 20
    assert not missing_names(told)
    assert missing_names({"EngineLoop", "no_such_name"}) == {"no_such_name"}


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
        ("services/penstock/generation/engine/in_step.py", ""),
        ("services/penstock/generation/engine/a.py", "def _settled(): ..."),
        ("services/a.py", "class OutputSink: ..."),
        ("services/a.py", "def is_guide(): ..."),
    ],
)
def test_a_retired_word_would_be_seen(path: str, source: str) -> None:
    assert len(list(retired_in(path, source))) == 1


@pytest.mark.parametrize("source", ["def leave(): ...", "class EarlyStopping: ...", "def live_requests(): ..."])
def test_plain_english_is_let_pass(source: str) -> None:
    assert not list(retired_in("services/token_healing.py", source))


@pytest.mark.parametrize("text", ["# A request whose", '"tokens of"\n    "which"', "// Rows of so\n// many"])
def test_a_foreign_phrase_would_be_seen(text: str) -> None:
    assert len(list(foreign_in("services/a.py", text))) == 1


@pytest.mark.parametrize("source", ['"""What it is."""', 'def f():\n    """Whether it runs."""'])
def test_a_question_would_be_seen(source: str) -> None:
    assert len(list(questions_in("services/a.py", source))) == 1
