"""Stop strings: text never shows part of one, and nothing else is held back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.text.stop_strings import StopStrings


def run(stops: list[str], portions: list[str], *, include: bool = False) -> tuple[str, str | None]:
    stop_strings = StopStrings(stops, include)
    text = "".join(stop_strings.push(portion).text for portion in portions)
    end = stop_strings.finish("", None)
    return text + end.text, stop_strings.matched


def test_text_ends_before_the_stop_string() -> None:
    assert run(["</end>"], ["hello</", "en", "d> more"]) == ("hello", "</end>")


def test_text_ends_after_it_when_included() -> None:
    assert run(["</end>"], ["hello</", "en", "d> more"], include=True) == ("hello</end>", "</end>")


def test_only_the_longest_possible_beginning_is_held_back() -> None:
    stop_strings = StopStrings(["\n\nUser:"], include=False)
    assert stop_strings.push("one\n").text == "one"
    assert stop_strings.push("two").text == "\ntwo"
    assert stop_strings.push("\n\n\nUs").text == "\n"
    assert stop_strings.push("e").text == ""
    assert stop_strings.push("d").text == "\n\nUsed"


def test_a_tag_that_shares_its_beginning_comes_out_whole() -> None:
    assert run(["</tool_call>"], ["x</", "think", "> y"]) == ("x</think> y", None)


def test_the_first_to_be_complete_wins_and_the_longest_of_a_tie() -> None:
    assert run(["abcX", "bc"], ["abcX"]) == ("a", "bc")
    assert run(["c", "abc"], ["xabc"]) == ("x", "abc")


def test_nothing_follows_a_match() -> None:
    stop_strings = StopStrings(["."], include=False)
    assert stop_strings.push("a.b") == ("a", ".")
    assert stop_strings.push("c") == ("", None)
    assert stop_strings.finish("d", ".") == ("", None)


def test_the_rest_comes_with_the_end() -> None:
    assert run(["stop"], ["the sto"]) == ("the sto", None)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a###")])
def test_a_stop_string_that_only_the_engine_knows_is_cut_at_the_end(include: bool, text: str) -> None:
    assert StopStrings([], include).finish("a###b", "###") == (text, "###")


ALPHABET = "ab<"


@given(
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4),
    text=st.text(ALPHABET, max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=5),
    include=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_portions_do_not_matter(stops: list[str], text: str, cuts: list[int], include: bool) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    portions = [text[start:end] for start, end in itertools.pairwise(bounds)]
    one_by_one = run(stops, list(text), include=include)
    assert run(stops, portions, include=include) == one_by_one
    shown, matched = one_by_one
    if matched is None:
        assert shown == text
    else:
        body = shown.removesuffix(matched) if include else shown
        assert not any(stop in body for stop in stops)
        assert text.startswith(body + matched)


@given(stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1), text=st.text(ALPHABET, max_size=12))
@settings(max_examples=100, deadline=None)
def test_what_is_held_back_begins_a_stop_string(stops: list[str], text: str) -> None:
    stop_strings = StopStrings(stops, include=False)
    sent = stop_strings.push(text)
    if sent.matched is None:
        held = text[len(sent.text) :]
        ends = {text[place:] for place in range(len(text))}
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        assert held == max(ends & beginnings, key=len, default="")
