"""The pages read well: lines of prose have at most 120 characters, and no phrase has to be read twice.

tests/unit/rules/test_words.py holds the code to the same words.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from factories.source_tree import FOREIGN, ROOT

LONGEST_LINE = 120
# Pages that tell of the past, with the words of then.
PAST = ("CHANGELOG.md", "dev/")
# Made from the code, which has its own rule on words and wraps no lines.
GENERATED = ("docs/reference/",)
_FENCE = re.compile(r" *(?:```|~~~)")
_ITEM = re.compile(r" *(?:[*+-]|\d+[.)]) +")
# A table, a heading, or HTML: one line each, however long.
_ONE_LINE = re.compile(r" *(?:\||#+ |<|\[[^]]+\]: )")
_COMMAND_BEHIND = re.compile(r"\.(?:json|jsonl|svg|png) (?:penstock |python |make |~/)")
# Code, a link, or a word: nothing that a line could be broken in.
_UNBREAKABLE = re.compile(r"(?:`[^`]*`|\[[^]]*\]\([^)]*\)|\S)+")

_tracked = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
).stdout.split()
PAGES = [name for name in _tracked if (ROOT / name).is_file() and not name.startswith(PAST)]


def without_code(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page, with their numbers from 1, that are in no block of code and in no front matter."""
    lines = text.split("\n")
    begin = lines.index("---", 1) + 1 if lines[0] == "---" else 0
    in_fence = in_indented = in_list = False
    before = ""
    for number, line in enumerate(lines[begin:], begin + 1):
        if _FENCE.match(line):
            in_fence = not in_fence
        elif not in_fence:
            if line.strip() and not line.startswith(" "):
                in_list = bool(_ITEM.match(line))
            # An indented block begins behind an empty line. In a list it goes on with an item.
            in_indented = line.startswith("    ") and not in_list and (in_indented or not before.strip())
            if not in_indented:
                yield number, line
        before = line


def too_long(text: str) -> Iterator[str]:
    """Yield the lines of prose that are too long, with their numbers."""
    for number, line in without_code(text):
        words = _ITEM.sub("", line, count=1).strip()
        if len(line) > LONGEST_LINE and not _ONE_LINE.match(line) and not _UNBREAKABLE.fullmatch(words):
            yield f"{number}: {line}"


def run_together(text: str) -> Iterator[str]:
    """Yield the lines in which a command follows another one's file: wrapped as prose, nobody can copy them."""
    for number, line in enumerate(text.split("\n"), 1):
        if _COMMAND_BEHIND.search(line):
            yield f"{number}: {line}"


def foreign(text: str) -> list[str]:
    """Return the phrases of a page that are not plain English, also across lines and in tables."""
    return [found[0] for found in FOREIGN.finditer("\n".join(line for _, line in without_code(text)))]


def faults(pages: Iterable[str], of_text: Callable[[str], Iterable[str]]) -> dict[str, list[str]]:
    """Return the pages that have faults, each with its own."""
    found = {page: [*of_text(Path(ROOT, page).read_text(encoding="utf-8"))] for page in pages}
    return {page: wrong for page, wrong in found.items() if wrong}


def test_lines_of_prose_are_short() -> None:
    assert faults([page for page in PAGES if not page.startswith(GENERATED)], too_long) == {}


def test_commands_are_on_lines_of_their_own() -> None:
    assert faults(PAGES, run_together) == {}


def test_a_command_behind_another_would_be_seen() -> None:
    assert list(run_together("    penstock bench --json\n    load.json penstock bench --rates 1,2")) == [
        "2:     load.json penstock bench --rates 1,2"
    ]


def test_pages_are_in_plain_english() -> None:
    assert faults(PAGES, foreign) == {}


@pytest.mark.parametrize(
    "text",
    [
        "word " * 25,
        "* " + "word " * 25,
        "* an item\n\n    " + "word " * 25,
        "see [a page](" + "x" * 120 + ")",
        "é " * 61,
    ],
)
def test_a_long_line_would_be_seen(text: str) -> None:
    assert len(list(too_long(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "é" * 60 + " " + "é" * 59,
        "| " + "cell | " * 30,
        "# " + "word " * 30,
        "```sh\n" + "word " * 30 + "\n```",
        "a command:\n\n    " + "word " * 30,
        "* [a page](" + "x" * 120 + ")",
        "---\nkey: " + "word " * 30 + "\n---\n",
    ],
)
def test_what_cannot_be_broken_may_be_long(text: str) -> None:
    assert not list(too_long(text))


def test_a_foreign_phrase_would_be_seen() -> None:
    assert foreign("A request whose end is near, and so\nmany others, of which `whose` is one.") == [
        "whose",
        "so\nmany",
        "of which",
        "whose",
    ]
    assert not foreign("```\nwhose\n```\n")
