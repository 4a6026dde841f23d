"""Fields of a message are counted on the wire as protobuf reads it."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from penstock.common.config import ServerConfig
from penstock.common.errors import InvalidArgument
from penstock.generation.options.request_limits import DEFAULT_LIMITS
from penstock.serving.message_fields import bounded, check_fields
from penstock.v1 import common_pb2, config_pb2, text_pb2

CHAT, GENERATE = text_pb2.ChatRequest.DESCRIPTOR, text_pb2.GenerateTextRequest.DESCRIPTOR


def refused(data: bytes, limit: int, descriptor: Any = CHAT) -> InvalidArgument | None:
    try:
        check_fields(data, descriptor, limit)
    except InvalidArgument as error:
        return error
    return None


def test_the_field_with_the_most_entries_is_named() -> None:
    request = text_pb2.ChatRequest(model="m", messages=[{}] * 5)
    data = request.SerializeToString()
    assert refused(data, 6) is None
    error = refused(data, 5)
    assert error is not None
    assert (error.field, error.reason) == ("messages", "TOO_MANY")
    assert "--max-message-fields" in error.message


def test_fields_within_messages_count_and_lists_of_numbers_are_one() -> None:
    request = text_pb2.GenerateTextRequest()
    request.token_ids.ids.extend(range(10_000))
    request.config.logit_bias.update({1: 1.0, 2: 2.0})
    data = request.SerializeToString()
    # token_ids, ids; config, two entries of a key and a value each.
    descriptor = text_pb2.GenerateTextRequest.DESCRIPTOR
    assert refused(data, 9, descriptor) is None
    error = refused(data, 8, descriptor)
    assert error is not None
    assert (error.field or "").startswith("config.logit_bias")


def bounded_options() -> config_pb2.GenerationConfig:
    """Every list of options with as many entries as its default bound, none of them empty."""
    limits, ids = DEFAULT_LIMITS, [1] * 8
    run = common_pb2.TokenIds(ids=ids)
    word = config_pb2.WordAlternatives(alternatives=[run] * limits.max_alternatives)
    return config_pb2.GenerationConfig(
        logit_bias=dict.fromkeys(range(limits.max_logit_bias), 1.0),
        bad_words_ids=[run] * limits.max_bad_words,
        sequence_bias=[config_pb2.SequenceBias(token_ids=ids, bias=1.0)] * limits.max_sequence_bias,
        force_words_ids=[word] * limits.max_forced_words,
        constraints=[config_pb2.DecodingConstraint(disjunctive=word)] * limits.max_forced_words,
        suppress_tokens=range(limits.max_suppress_tokens),
        allowed_token_ids=range(limits.max_allowed_tokens),
        allowed_token_trie=config_pb2.AllowedTokenTrie(sequences=[run] * limits.max_trie_sequences),
        logits_processor=[config_pb2.Plugin(name="a", parameters="{}")] * limits.max_plugins,
    )


def test_all_lists_of_options_fit_together_at_their_bounds() -> None:
    options = bounded_options()
    stop = config_pb2.StopConfig(stop_strings=["a"] * 32, stop_token_ids=[common_pb2.TokenIds(ids=[1])] * 64)
    request = text_pb2.GenerateTextRequest(token_ids=common_pb2.TokenIds(ids=range(100_000)), config=options, stop=stop)
    assert refused(request.SerializeToString(), ServerConfig.max_message_fields, GENERATE) is None


def test_a_bias_for_a_third_as_many_ids_fits_and_one_for_each_of_a_vocabulary_is_refused_by_its_name() -> None:
    most = ServerConfig.max_message_fields
    request = text_pb2.GenerateTextRequest(text="x")
    request.config.logit_bias.update(dict.fromkeys(range(21_000), 1.0))
    assert refused(request.SerializeToString(), most, GENERATE) is None
    request.config.logit_bias.update(dict.fromkeys(range(150_000), 1.0))
    data = request.SerializeToString()
    error = refused(data, most, GENERATE)
    assert error is not None
    assert error.field == "config.logit_bias"
    assert "--max-message-fields" in error.message
    # With the bound that the guide names they pass, and take no more than a request may.
    assert refused(data, 3 * 150_000 + 3, GENERATE) is None
    assert 1_700_000 < len(data) < 1_900_000


def deep(levels: int) -> bytes:
    """Make a request with so many lists within each other."""
    value = b""
    for _ in range(levels):
        # ListValue.values in Value.list_value
        value = b"\x0a" + _length(value) + value
        value = b"\x32" + _length(value) + value
    entry = b"\x12" + _length(value) + value
    struct = b"\x0a" + _length(entry) + entry
    return b"\x2a" + _length(struct) + struct


def test_deep_messages_are_counted_without_recursion() -> None:
    assert refused(deep(5000), 2000) is not None


@pytest.mark.parametrize("limit", [3000, 100_000])
def test_deep_messages_take_no_memory(limit: int) -> None:
    data = deep(2000)
    tracemalloc.start()
    try:
        refused(data, limit)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_fields_that_are_not_known_count_for_the_message_that_has_them() -> None:
    unknown = b"\xfa\x7f\x00"
    config = 10 * unknown
    descriptor = text_pb2.GenerateTextRequest.DESCRIPTOR
    number = descriptor.fields_by_name["config"].number
    error = refused(bytes((number << 3 | 2, len(config))) + config, 5, descriptor)
    assert error is not None
    assert error.field == "config"
    error = refused(10 * unknown, 5, descriptor)
    assert error is not None
    assert error.field == "request"


def _length(data: bytes) -> bytes:
    size, out = len(data), bytearray()
    while size >= 128:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out)


def test_bytes_that_are_no_message_are_left_to_the_parser() -> None:
    draw = random.Random(1)
    parse = bounded(text_pb2.ChatRequest.FromString, 20)
    for _ in range(5000):
        data = draw.randbytes(draw.randrange(200))
        try:
            parse(data)
        except (DecodeError, InvalidArgument):
            continue


def test_a_short_message_is_parsed_at_once() -> None:
    assert bounded(text_pb2.ChatRequest.FromString, 1000)(b"\x12\x00" * 1000).messages
    with pytest.raises(InvalidArgument):
        bounded(text_pb2.ChatRequest.FromString, 1000)(b"\x12\x00" * 1001)
