"""A body becomes a JSON object within bounds; what is refused is refused by the name that the caller wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest
from penstock.common.errors import InvalidArgument
from penstock.gateway.json_body import BodyBounds, is_broken_text, parse_object

BOUNDS = BodyBounds()
# Small enough to be met by bodies that a reader can see.
TIGHT = BodyBounds(most_depth=3, most_values=12, most_containers=4, most_digits=20)


def refusal(body: bytes, bounds: BodyBounds = TIGHT) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as raised:
        parse_object(body, bounds)
    return raised.value


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"prompt": "commas,,,,,,,,,,,,,,, [[[[[[[[ {{{{{{{ are no values: :::::::"},
        {"prompt": 'quoted "[[[[[[[[" and \\ and "\\" and \\" at its end \\\\'},
        {"a": "", "b": ["", "", ","], "": "]"},
        {"a": [[1]], "b": {"c": 1}},
        {"a": -1.5e10, "b": 10**19, "c": [1e-300, True, None]},
        {"a": "é 漢 😀 \x7f"},
    ],
)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_an_object_within_the_bounds_is_what_json_says(value: Any, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert parse_object(body, TIGHT) == value
    assert parse_object(b"\xef\xbb\xbf" + json.dumps(value, indent=3).encode(), BOUNDS) == value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[1]",
        b'"text"',
        b"{",
        b"{}}",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": "\xff"}',
        # Half of a pair as bytes, which UTF-8 has not.
        b'{"a": "\xed\xa0\x80"}',
        '{"a": 1}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": "' + b"[" * 100,
        b'"' * 11 + b"[" * 100,
        b"\\" * 999,
    ],
)
def test_what_is_no_object_is_malformed(body: bytes) -> None:
    assert refusal(body, BodyBounds(most_containers=1 << 20)).reason == "MALFORMED_MESSAGE"


@pytest.mark.parametrize("depth", [64, 65, 600, 12_000, 16_000])
@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_bounded_and_the_field_is_named(depth: int, opened: str, closed: str) -> None:
    nested = opened * (depth - 1) + "1" + closed * (depth - 1)
    body = f'{{"first": [{{}}], "tools": {nested}}}'.encode()
    if depth <= BOUNDS.most_depth:
        assert list(parse_object(body, BOUNDS)) == ["first", "tools"]
        return
    error = refusal(body, BOUNDS)
    assert (error.reason, error.field) == ("TOO_DEEP", "tools" if len(body) < 1 << 16 else "body")
    assert "--max-body-depth" in error.description


def test_lists_and_objects_are_counted_outside_of_texts() -> None:
    assert parse_object(b'{"a": [{}, {}, "[[[[[[[[["]}', TIGHT)
    error = refusal(b'{"a": [{}, {}, {}]}')
    assert error.reason == "TOO_MANY"
    assert "4 lists and objects (--max-body-containers)" in error.description


def test_values_and_names_are_counted_outside_of_texts() -> None:
    assert parse_object(b'{"a": [1, 2, 3, 4, 5, 6, 7, 8, "1, 2, 3, 4"]}', TIGHT)
    assert "12 values (--max-body-values)" in refusal(b'{"a": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}').description
    # So many texts are too many values, whatever stands between them.
    assert "12 values" in refusal(b"{" + b'"a"' * 13 + b"[[[[[").description


@pytest.mark.parametrize("number", ["1" * 21, "-" + "1" * 21, "9" * 400, "1" * 5000])
def test_digits_of_an_integer_are_bounded_and_the_field_is_named(number: str) -> None:
    error = refusal(f'{{"options": [{{"top_k": 1}}, {{"seed": {number}}}]}}'.encode())
    assert (error.field, error.description) == ("options[1].seed", "must not have more than 20 digits")


@pytest.mark.parametrize("number", ["1e999", "-1E+999", "1.5e309", "1" * 400 + ".0", "1" * 20 + "e300"])
def test_a_number_beyond_all_floats_is_out_of_range(number: str) -> None:
    error = refusal(f'{{"temperature": {number}}}'.encode())
    assert (error.field, error.description) == ("temperature", "is out of range")


@pytest.mark.parametrize(
    "number", ["1e308", "1e+308", "-0.1e0001", "0." + "1" * 400, "1" * 20, "-" + "1" * 20, "5e-324"]
)
def test_long_numbers_that_are_none_of_these_are_read(number: str) -> None:
    found = parse_object(f'{{"a": {number}, "b": "{"1" * 99} 1e999"}}'.encode(), TIGHT)
    assert found["a"] == json.loads(number)


def test_a_number_that_a_double_of_its_name_hides_is_still_refused() -> None:
    assert refusal(b'{"a": 1e999, "a": 1}').field == "body"


@pytest.mark.parametrize(
    "half", [r"\ud800", r"\uDFFF", r"\ud83d x", r"\ude00\ud83d", r"\\\ud83d\\\ude00", r"\ud83d\ud83d\ude00"]
)
@pytest.mark.parametrize(
    ("body", "field"),
    [
        (r'{"input": "%s"}', "input"),
        (r'{"messages": [{"content": ""}, {"content": [{"text": "a%s"}]}]}', "messages[1].content[0].text"),
    ],
)
def test_half_a_pair_is_refused_wherever_it_is(half: str, body: str, field: str) -> None:
    error = refusal((body % half).encode(), BOUNDS)
    assert (error.field, error.description) == (field, "has a lone surrogate, which is not text")


def test_a_name_with_half_a_pair_is_shown_without_it() -> None:
    assert refusal(rb'{"a": {"b\ud800": 1}}').field == "a.b?"
    deep = rb'{"a":[[[[[[[[[[["\ud800"]]]]]]]]]]]}'
    assert refusal(deep, BOUNDS).field == "a[0][0][0][0][0][0][0]…"
    assert refusal(b'{"%b": "\\ud800"}' % (b"x" * 99), BOUNDS).field == "x" * 64


@pytest.mark.parametrize(
    "text", [r"\ud83d\ude00", r"\\ud800", r"\\\\ud800", r"\\\ud83d\ude00", r"\uD83D\uDE00\uD83D\uDE00"]
)
def test_whole_pairs_and_what_only_looks_like_a_half_are_text(text: str) -> None:
    body = b'{"a": "%b"}' % text.encode()
    assert parse_object(body, TIGHT) == json.loads(body)


def test_broken_texts() -> None:
    assert [is_broken_text(each) for each in ("a", "é", "😀", "\ud800", "a\udfff", 1, None)] == [False] * 3 + [
        True,
        True,
        False,
        False,
    ]
