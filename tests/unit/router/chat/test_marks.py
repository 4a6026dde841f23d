"""Markers in text as it comes: the same places as by trying each, and no text is looked at over and over."""

from __future__ import annotations

import random

import pytest
from penstock.router.chat.chat_output import make_parser
from penstock.router.chat.formats import TOOLS, choose_format
from penstock.router.chat.marks import Marks

TAGS = [(*row.opens, *row.inline, "</think>") for row in TOOLS]


def half_of(text: str, tags: tuple[str, ...]) -> int:
    """Place of the longest beginning of a tag that ends the text, by trying all."""
    places = range(len(text) + 1)
    return next(place for place in places if any(tag != text[place:] and tag.startswith(text[place:]) for tag in tags))


@pytest.mark.parametrize("tags", TAGS, ids=[row.name for row in TOOLS])
def test_markers_are_found_as_by_trying_each(tags: tuple[str, ...]) -> None:
    marks, chance = Marks(tags), random.Random(7)
    pieces = [*tags, *(tag[: len(tag) // 2] for tag in tags), "a", " ", "<", "{", "["]
    for _ in range(300):
        text = "".join(chance.choices(pieces, k=chance.randrange(5)))
        found = min(((text.find(tag), tag) for tag in tags if tag in text), default=(-1, ""))
        assert marks.find(text) == found
        assert marks.half(text) == half_of(text, tags)


def test_nothing_is_a_marker_where_there_are_none() -> None:
    assert (Marks(()).find("<a>"), Marks(()).half("<a>")) == ((-1, ""), 3)


@pytest.mark.parametrize("text", ["\n", "word ", "a <b", "<"])
def test_a_thought_is_looked_at_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, find = [0], Marks.find

    def counted(self: Marks, held: str, begin: int = 0) -> tuple[int, str]:
        looked[0] += len(held) - begin
        return find(self, held, begin)

    monkeypatch.setattr(Marks, "find", counted)
    parser = make_parser(choose_format("", "hermes", "think"), parse_tools=True, in_reasoning=True)
    parser.feed("So.")
    for _ in range(500):
        parser.feed(text)
    # Once for the thought's end, once for a call, and again what may be half of one.
    assert looked[0] < 500 * 2 * (len(text) + 12)
