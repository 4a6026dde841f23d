"""Tokens that begin with another token's text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from penstock.text.token_bytes import TokenBytes, TokenPrefixes

WORDS = [
    b"http",
    b"https",
    b"http://",
    b"htt",
    b"hu",
    b"<|end|>",
    b"<",
    b"\xf0\x9f",
    b"\xc3",
    "é".encode(),
    "ésa".encode(),
    b"",
]
TABLE = TokenBytes(dict(enumerate(WORDS)), special=[5])


def extended(token_id: int) -> set[bytes]:
    return {WORDS[one] for one in TokenPrefixes(TABLE).extensions(token_id)}


def test_extensions_begin_with_the_text_and_include_itself() -> None:
    assert extended(0) == {b"http", b"https", b"http://"}
    assert extended(3) == {b"htt", b"http", b"https", b"http://"}
    assert extended(4) == {b"hu"}
    assert extended(9) == {"é".encode(), "ésa".encode()}


def test_a_special_token_neither_extends_nor_is_extended() -> None:
    assert extended(6) == {b"<"}
    assert extended(5) == set()


def test_a_part_of_a_character_and_no_text_at_all_have_no_extensions() -> None:
    assert extended(7) == set()
    assert extended(8) == set()
    assert extended(11) == set()
    assert TokenPrefixes(TABLE).extensions(4711) == frozenset()


def test_added_text_is_what_lies_beyond_the_shorter_token() -> None:
    prefixes = TokenPrefixes(TABLE)
    assert prefixes.added_text(0, 2) == "://"
    assert prefixes.added_text(9, 10) == "sa"
    assert prefixes.added_text(0, 0) == ""


@example({})
@example({0: b"a\0", 1: b"a", 2: b"longer than eight", 3: b"longer than", 4: b"longer t", 5: b"longer t\0"})
@given(st.dictionaries(st.integers(0, 60), st.binary(max_size=4) | st.text("abé🙂", max_size=3).map(str.encode)))
def test_extensions_are_those_that_a_scan_of_the_table_finds(tokens: dict[int, bytes]) -> None:
    prefixes = TokenPrefixes(TokenBytes(tokens, special=[]))
    texts = {}
    for token_id, data in tokens.items():
        try:
            texts[token_id] = data.decode()
        except UnicodeDecodeError:
            continue
    for token_id in tokens:
        text = texts.get(token_id, "")
        expected = {one for one, other in texts.items() if text and other.startswith(text)}
        assert prefixes.extensions(token_id) == expected
