"""The pages: links lead somewhere, files and functions that they name exist, the site's contents list every page."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from factories.source_tree import ROOT

REPOSITORY = "https://github.com/penstock/penstock/"
_LINK = re.compile(r"\]\(([^)\s#]*)(#[^)\s]*)?\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_ITEM, _SHALLOW_ITEM = re.compile(r"(?:[*-]|\d+\.) "), re.compile(r" {1,3}(?:[*-]|\d+\.) ")
# A line that is no item, nor goes on with one.
_TEXT = re.compile(r"(?!(?:[*-]|\d+\.) )\S")
_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# `generation/engine/loop.py`, `docs/guide/models.md`, `tests/unit/`; names in braces stand for many.
_PATH = re.compile(r"`([\w-](?:[\w.-]*/)+[\w.-]*|\.ci/[\w.-]+)`")
# `stopping.py`
_FILE = re.compile(r"`([\w-]+\.py)`")
# `generation/engine/loop.py:EngineLoop.submit`
_FUNCTION = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.py):([\w.]+)`")
# `tests/unit/generation/*/test_native_*.py`
_PATTERN = re.compile(r"`([\w.-][\w./*-]*/[\w.-]*\*[\w./*-]*\.py)`")
# `test_stream.py`, `tests/integration/http2/test_*`, `test_a_row_is_the_same`: files or functions of tests.
_TEST = re.compile(r"`((?:[\w.-]+/)*test_[\w*]+(?:\.py)?)`")
_TEST_FUNCTION = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
_MERGE_MARKER = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)
_PREFIXES = ("", "services/penstock/", "services/penstock/generation/", "services/")
# Trees that pages name files of.
_TREES = ("services", "clients", "tests", "benchmarks", "tools", "dev", "protos", "deploy")
_tracked = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
).stdout.split()
PAGES = [ROOT / name for name in _tracked if (ROOT / name).is_file()] or [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
]
SITE = sorted((ROOT / "docs").rglob("*.md"))
# Of what is told of the past the names are those of then.
_PAST = (ROOT / "CHANGELOG.md", ROOT / "dev")
PRESENT = [page for page in PAGES if not any(page.is_relative_to(past) for past in _PAST)]
# Functions that the tour must name at least: it traces a request through every service's rooms.
LEAST_FUNCTIONS = 40


@cache
def anchors(page: Path) -> set[str]:
    """Make the anchors of a page's headings, as the site and the forge do."""
    headings = _HEADING.findall(_CODE_BLOCK.sub("", page.read_text(encoding="utf-8")))
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)).strip().lower().replace(" ", "-")
        for text in headings
    }


@cache
def tree() -> frozenset[str]:
    """List the repository's files and folders, folders with a slash at their end, all with one at their beginning."""
    paths = (path for name in _TREES for path in (ROOT / name).rglob("*") if "__pycache__" not in path.parts)
    return frozenset(f"/{path.relative_to(ROOT).as_posix()}{'/' * path.is_dir()}" for path in paths)


@cache
def paths_by_name() -> dict[str, list[str]]:
    """Map the last part of a path to the tree's paths that end with it, in order."""
    found: dict[str, list[str]] = {}
    for path in sorted(tree()):
        found.setdefault(path.rstrip("/").rpartition("/")[2], []).append(path)
    return found


@cache
def find(name: str) -> Path | None:
    """Find a file or folder that a page names: from the repository or a package, else by the end of its path."""
    for prefix in _PREFIXES:
        if (ROOT / prefix / name).exists():
            return ROOT / prefix / name
    last = name.rstrip("/").rpartition("/")[2]
    ends = [path for path in paths_by_name().get(last, ()) if path.endswith((f"/{name}", f"/{name}/"))]
    return ROOT / ends[0][1:] if ends else None


@cache
def definitions(path: Path) -> frozenset[str]:
    """Collect the names that a module defines: functions, classes, constants, and members as `Class.member`."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for one in body:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + one.name)
                if isinstance(one, ast.ClassDef):
                    collect(one.body, f"{prefix}{one.name}.")
            elif isinstance(one, ast.Assign):
                found.update(prefix + target.id for target in one.targets if isinstance(target, ast.Name))
            elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                found.add(prefix + one.target.id)

    collect(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return frozenset(found)


def faults(pages: Iterable[Path], of_one: Callable[[Path, str], Iterable[str]]) -> dict[str, list[str]]:
    """Return the pages that have faults, each with its own; `of_one` finds those of a page and its text."""
    found = {page.relative_to(ROOT).as_posix(): [*of_one(page, page.read_text(encoding="utf-8"))] for page in pages}
    return {name: wrong for name, wrong in found.items() if wrong}


def dead_links(page: Path, text: str) -> Iterator[str]:
    for target, anchor in _LINK.findall(text):
        if target.startswith(REPOSITORY):
            if not (ROOT / target.removeprefix(REPOSITORY).split("/", 2)[2]).exists():
                yield target
        elif "://" not in target and not target.startswith("mailto:"):
            other = (page.parent / target).resolve() if target else page
            if not other.exists() or (anchor and other.suffix == ".md" and anchor[1:] not in anchors(other)):
                yield f"{target}{anchor}"


def test_links_lead_somewhere() -> None:
    assert faults(PAGES, dead_links) == {}


@pytest.mark.parametrize(
    "link", ["no-such.md", f"{REPOSITORY}blob/main/no-such", "README.md#no-such", "#no-such", "docs/no-such"]
)
def test_a_dead_link_would_be_seen(link: str) -> None:
    assert len([*dead_links(ROOT / "README.md", f"[a](README.md) [b]({link}) [c](https://a.b/c)")]) == 1


def test_no_merge_was_left_half_done() -> None:
    assert faults(PAGES, lambda _, text: _MERGE_MARKER.findall(text)) == {}


def missing_files(_: Path, text: str) -> Iterator[str]:
    yield from (name for name in {*_PATH.findall(text), *_FILE.findall(text)} if find(name) is None)
    yield from (one for one in set(_PATTERN.findall(text)) if not fnmatch.filter(tree(), f"*/{one}"))


def test_pages_of_the_site_name_files_that_exist() -> None:
    assert faults(SITE, missing_files) == {}
    named = "`services/penstock/router/app.py` `services/no_such.py` `no_such.py` `tests/unit/*/no_such_*.py`"
    assert len([*missing_files(ROOT, named)]) == 3


@cache
def functions_of_tests() -> frozenset[str]:
    """List the functions of the tests, each with a slash at its beginning, as files have it."""
    paths = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "benchmarks").rglob("test_*.py")]
    return frozenset(f"/{name}" for path in paths for name in _TEST_FUNCTION.findall(path.read_text(encoding="utf-8")))


@cache
def is_test(name: str) -> bool:
    """True for a file, a pattern of files or a function of the tests."""
    file = name if name.endswith((".py", "*")) else f"{name}.py"
    if "*" not in file:
        return find(file) is not None or f"/{name}" in functions_of_tests()
    return bool(fnmatch.filter(tree(), f"*/{file}")) or f"/{name}" in functions_of_tests()


def test_tests_that_pages_name_exist() -> None:
    assert faults(PRESENT, lambda _, text: (name for name in _TEST.findall(text) if not is_test(name))) == {}


@pytest.mark.parametrize("name", ["tests/unit/test_http2_*", "test_cellar_*", "test_demo_command.py", "test_no_such"])
def test_a_test_that_is_gone_would_be_seen(name: str) -> None:
    assert not is_test(name)


def missing_functions(_: Path, text: str) -> Iterator[str]:
    for file, name in _FUNCTION.findall(text):
        path = find(file)
        if path is None or name not in definitions(path):
            yield f"{file}:{name}"


def test_functions_that_pages_name_exist() -> None:
    assert faults(PAGES, missing_functions) == {}
    assert [*missing_functions(ROOT, "`router/app.py:RouterApp.start` `router/app.py:RouterApp.no_such`")] == [
        "router/app.py:RouterApp.no_such"
    ]


def test_the_tour_names_the_functions_of_its_trace() -> None:
    named = set(_FUNCTION.findall((ROOT / "docs" / "learn" / "tour.md").read_text(encoding="utf-8")))
    assert len(named) >= LEAST_FUNCTIONS


def broken_lists(_: Path, text: str) -> Iterator[str]:
    """Markdown of the site wants an empty line before a list, and four spaces before one within another; the forge's
    does not."""
    lines = _CODE_BLOCK.sub("", text).split("\n")
    yield from (line for before, line in pairwise(lines) if _ITEM.match(line) and _TEXT.match(before))
    yield from (line for line in lines if _SHALLOW_ITEM.match(line))


def test_lists_are_lists_on_the_site_too() -> None:
    assert faults(SITE, broken_lists) == {}
    assert [*broken_lists(ROOT, "text\n* glued\n\n* one\n  * shallow\n")] == ["* glued", "  * shallow"]


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages == contents
