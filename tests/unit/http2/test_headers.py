"""Header blocks: what is read here is what hpack reads."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.http2 import frames
from penstock.http2.headers import HeaderDecoder, Headers, HeadersTooLarge
from penstock.http2.metadata import parse_metadata

NAMES = st.sampled_from([":path", ":method", "te", "x-request-id", "grpc-timeout", "content-type", "y" * 130])
FIELDS = st.lists(st.tuples(NAMES, st.text("a/é0", max_size=140)), max_size=8)
LIMIT = 1 << 14


def by_hpack(decoder: Decoder, block: bytes) -> Headers | None:
    try:
        fields = [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]
        return [(name.decode(errors="replace"), value.decode(errors="replace")) for name, value in fields]
    except HPACKError:
        return None


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(FIELDS, st.sampled_from(["plain", "hpack", "huffman"])), max_size=6))
def test_blocks_of_every_kind_on_one_connection(blocks: list[tuple[list[tuple[str, str]], str]]) -> None:
    encoder, decoder = Encoder(), HeaderDecoder(LIMIT)
    for fields, kind in blocks:
        is_plain = kind == "plain"
        block = frames.request_headers(fields) if is_plain else encoder.encode(fields, huffman=kind == "huffman")
        assert decoder.decode(block) == fields


def outcome(decoder: HeaderDecoder, block: bytes) -> Headers | None:
    try:
        return decoder.decode(block)
    except (HPACKError, HeadersTooLarge):
        return None


@settings(max_examples=150, deadline=None)
@given(FIELDS, st.lists(FIELDS, max_size=5), st.integers(0, 400))
def test_blocks_that_begin_alike_are_read_as_one_alone_is(
    begin: list[tuple[str, str]], ends: list[list[tuple[str, str]]], limit: int
) -> None:
    decoder = HeaderDecoder(limit)
    for end in ends:
        block = frames.request_headers([*begin, *end])
        assert outcome(decoder, block) == outcome(HeaderDecoder(limit), block)


def test_repeated_names_keep_their_order_and_joined_binary_values_are_split() -> None:
    fields = [
        ("a", "1"),
        ("b-bin", "AQ, Ag==,Aw"),
        ("a", "2"),
        ("b-bin", "BA"),
        ("a", "1"),
        ("c", "x,y"),
        ("d-bin", ""),
    ]
    block = frames.request_headers([(name, value) for name, value in fields if not name.endswith("-bin")])
    assert HeaderDecoder(LIMIT).decode(block) == [("a", "1"), ("a", "2"), ("a", "1"), ("c", "x,y")]
    assert list(parse_metadata([*fields, (":path", "/"), ("grpc-status", "0")])) == [
        ("a", "1"),
        ("b-bin", b"\1"),
        ("b-bin", b"\2"),
        ("b-bin", b"\3"),
        ("a", "2"),
        ("b-bin", b"\4"),
        ("a", "1"),
        ("c", "x,y"),
        ("d-bin", b""),
    ]


@pytest.mark.parametrize("value", ["A", "AQ!", "A Q=", "AQ,A"])
def test_a_binary_value_that_is_not_base64_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"base64|padd|alphabet|multiple"):
        list(parse_metadata([("a-bin", value)]))


@settings(max_examples=250, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 120))
def test_any_bytes_are_read_as_hpack_reads_them(block: bytes, limit: int) -> None:
    ours = HeaderDecoder(limit)
    expected = by_hpack(Decoder(max_header_list_size=limit), block)
    if expected is None:
        with pytest.raises((HPACKError, HeadersTooLarge)):
            ours.decode(block)
    else:
        assert ours.decode(block) == expected


@settings(max_examples=150, deadline=None)
@given(FIELDS, st.data())
def test_a_block_that_was_cut_or_changed_is_read_as_hpack_reads_it(
    fields: list[tuple[str, str]], data: st.DataObject
) -> None:
    block = bytearray(frames.RESPONSE_HEADERS + frames.request_headers(fields))
    place = data.draw(st.integers(0, len(block) - 1))
    block[place] = data.draw(st.integers(0, 255))
    cut = bytes(block[: data.draw(st.integers(0, len(block)))])
    expected = by_hpack(Decoder(max_header_list_size=LIMIT), cut)
    ours = HeaderDecoder(LIMIT)
    # One that it begins like, perhaps.
    assert ours.decode(frames.RESPONSE_HEADERS + frames.request_headers(fields))
    if expected is None:
        with pytest.raises((HPACKError, HeadersTooLarge)):
            ours.decode(cut)
    else:
        assert ours.decode(cut) == expected


def test_joined_binary_values_are_no_larger_than_headers_may_be() -> None:
    few = ",".join(["AA"] * 300)
    assert len(list(parse_metadata([("a-bin", few)]))) == 300
    for headers in ([("a-bin", "," * 3900)], [("a-bin", few), ("b-bin", few)]):
        with pytest.raises(ValueError, match="too large"):
            list(parse_metadata(headers))
