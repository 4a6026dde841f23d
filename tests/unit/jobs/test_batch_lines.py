"""Lines of a batch's file: found whatever the pieces, and checked before one of them runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.jobs.batch_lines import LineCheck, LineSplitter, RawLine
from penstock.jobs.job_records import LineProblem, NewLine

URL = "/v1/completions"


def line(**facts: Any) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": URL, "body": {}, **facts}).encode()


def problem_of(data: bytes) -> LineProblem | NewLine:
    return LineCheck(URL, 1000).check(RawLine(3, 0, len(data), data))


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12).filter(lambda one: b"\n" not in one), max_size=8), st.integers(1, 9))
def test_lines_and_their_places_do_not_depend_on_the_pieces(lines: list[bytes], size: int) -> None:
    whole = b"\n".join(lines)
    splitter = LineSplitter(1000)
    found: list[RawLine] = []
    for at in range(0, len(whole), size):
        found += splitter.feed(whole[at : at + size])
    found += splitter.end()
    assert [(one.number, one.data) for one in found] == [
        (number, one) for number, one in enumerate(lines, 1) if one.strip()
    ]
    assert all(whole[one.place : one.place + one.num_bytes] == one.data for one in found)


def test_a_line_that_is_too_long_is_not_held() -> None:
    splitter = LineSplitter(4)
    assert list(splitter.feed(b"123456")) == []
    (found,) = splitter.feed(b"7890\n")
    assert (found.num_bytes, found.data) == (10, b"")
    assert [one.data for one in splitter.feed(b"abcd\n")] == [b"abcd"]


def test_a_valid_line_is_kept_by_its_place() -> None:
    data = line(custom_id="mine")
    assert problem_of(data) == NewLine(3, "mine", 0, len(data))


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b'"' + b"x" * 1000 + b'"', "line_too_long", None),
        (line(custom_id=""), "invalid_custom_id", "custom_id"),
        (line(custom_id=7), "invalid_custom_id", "custom_id"),
        (line(custom_id="\0"), "invalid_custom_id", "custom_id"),
        (line(custom_id="\ud800"), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/embeddings"), "mismatched_url", "url"),
        (line(body="x"), "invalid_body", "body"),
        (line(body={"stream": True}), "stream_not_supported", "body.stream"),
    ],
)
def test_a_problem_names_its_line_and_field(data: bytes, code: str, param: str | None) -> None:
    found = problem_of(data)
    assert isinstance(found, LineProblem)
    assert (found.code, found.param, found.line) == (code, param, 3)
