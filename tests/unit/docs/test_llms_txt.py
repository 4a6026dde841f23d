"""docs/llms.txt lists every page of the site, with what it is about."""

from __future__ import annotations

import pytest
from factories.source_tree import ROOT

from tools.llms_txt import OUTPUT, address, listing, pages, summary


def test_the_list_is_up_to_date() -> None:
    assert OUTPUT.read_text(encoding="utf-8") == listing(), "python tools/llms_txt.py"


def test_every_page_is_in_it_once() -> None:
    written = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    text = OUTPUT.read_text(encoding="utf-8")
    assert [page for page in written if page != "index.md" and text.count(f"]({address(page)})") != 1] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# A\n\nOne [two](b.md#c) three. Four.\n", ("A", "One two three.")),
        ("# A\n\n```sh\nx\n```\n\nUse it:\n", ("A", "Use it")),
        ("# A\n\n| a | b |\n", ("A", "")),
        ("# A\n\nVersion 1.2 is\nout. More.", ("A", "Version 1.2 is out.")),
    ],
)
def test_a_page_is_told_by_its_first_sentence(text: str, expected: tuple[str, str]) -> None:
    assert summary(text) == expected


def test_a_page_without_a_title_is_refused() -> None:
    with pytest.raises(ValueError, match="begins with its title"):
        summary("No title\n")


def test_inner_headings_belong_to_the_outer_one() -> None:
    nav = ["index.md", {"Run": ["a.md", {"More": [{"b": "c.md"}]}]}]
    assert list(pages(nav)) == [("", "index.md"), ("Run", "a.md"), ("Run", "c.md")]
