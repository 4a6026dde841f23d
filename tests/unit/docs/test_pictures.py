"""Every picture of the pages has a command that draws it in docs/learn/pictures.md, and a page that shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from factories.source_tree import ROOT

LIST = ROOT / "docs" / "learn" / "pictures.md"
PICTURES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "docs").rglob("*")
    if path.suffix in (".svg", ".png", ".jpg", ".gif", ".webp")
)
# Programs that a command may begin with: those of the tree, and a profiler for processes of earlier commits.
_KNOWN = re.compile(r"python tools/(\w+)\.py|python -m benchmarks (\w+)|(penstock) |(py-spy) record ")


def rows(text: str) -> Iterator[tuple[list[str], str]]:
    """Yield the pictures and the command of each row."""
    for line in text.splitlines():
        if line.startswith("| `"):
            pictures, command, _ = line.strip("| ").split(" | ", 2)
            yield re.findall(r"`([^`]+)`", pictures), command


def missing_commands(text: str) -> list[str]:
    """Return the commands that name nothing of the tree."""
    wrong = []
    for _, command in rows(text):
        found = [*_KNOWN.finditer(command)]
        tools = [ROOT / "tools" / f"{one[1]}.py" for one in found if one[1]]
        tools += [ROOT / "benchmarks" / f"{one[2]}.py" for one in found if one[2]]
        if not found or not all(tool.is_file() for tool in tools):
            wrong.append(command)
    return wrong


def test_every_picture_has_a_command_and_every_line_its_pictures() -> None:
    listed = [picture for pictures, _ in rows(LIST.read_text(encoding="utf-8")) for picture in pictures]
    assert sorted(listed) == PICTURES
    assert missing_commands(LIST.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("command", ["`python tools/no_such.py`", "`python -m benchmarks no_such`", "drawn by hand"])
def test_a_command_that_is_gone_would_be_seen(command: str) -> None:
    assert missing_commands(f"| `docs/a.svg` | {command} | a page |") == [command]


def test_every_picture_is_shown_or_linked() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "dev").rglob("*.md"), ROOT / "README.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages if page != LIST)
    assert [one for one in PICTURES if one.removeprefix("docs/").partition("/")[2] not in text] == []
