"""The decoder that the router fetches is the tokenizer's, and its texts are those of a DecodeStream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from factories.models.tokenizer_folders import byte_fallback_tokenizer, demo_vocabulary, detokenizers_of, vocabulary_of
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.common.errors import Internal
from penstock.router.requests.returned_sequence import ReturnedSequence
from penstock.router.tokenizer.detokenize import Batch, Detokenizer
from penstock.router.tokenizer.tokenizer_link import fetch_decode_table
from penstock.text.detokenizer import DecodeTable
from penstock.tokenizer import convert
from penstock.tokenizer.decode_stream import DecodeLimits, DecodeSession
from penstock.tokenizer.detokenizer_factory import DetokenizerFactory
from penstock.tokenizer.tokenizer import clean_up
from penstock.v1 import common_pb2
from penstock.v1 import tokenizer_pb2 as pb

VOCABULARIES = {"byte_level": demo_vocabulary(), "byte_fallback": vocabulary_of(byte_fallback_tokenizer())}
FACTORIES = {name: detokenizers_of(vocabulary) for name, vocabulary in VOCABULARIES.items()}
STOPS = ["</end>", "\n\n", "你a", "b"]


async def fetched(table: DecodeTable | None) -> DecodeTable | None:
    """Return the table as it arrives, part by part and as bytes."""

    async def parts() -> AsyncIterator[pb.GetDecodeTableResponse]:
        for part in convert.decode_table(table):
            yield pb.GetDecodeTableResponse.FromString(part.SerializeToString())

    return await fetch_decode_table(parts())


@pytest.mark.parametrize("kind", VOCABULARIES)
async def test_a_table_arrives_as_it_was(kind: str) -> None:
    sent = FACTORIES[kind].table
    came = await fetched(sent)
    assert sent is not None
    assert came is not None
    assert vars(came) == vars(sent)


async def test_a_decoder_that_is_no_table_has_none() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    cleaned = DetokenizerFactory(
        vocabulary.tokenizer, id_limit=vocabulary.bundle.id_limit, special_ids=vocabulary.special_ids, clean_up=clean_up
    )
    assert cleaned.table is None
    assert await fetched(cleaned.table) is None


async def test_a_tokenizer_that_does_not_know_the_call_has_none_and_other_errors_are_raised() -> None:
    async def failing(code: grpc.StatusCode) -> AsyncIterator[pb.GetDecodeTableResponse]:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())
        yield

    assert await fetch_decode_table(failing(grpc.StatusCode.UNIMPLEMENTED)) is None
    with pytest.raises(grpc.aio.AioRpcError):
        await fetch_decode_table(failing(grpc.StatusCode.UNAVAILABLE))


async def test_a_table_with_ids_outside_of_it_is_refused() -> None:
    async def wrong() -> AsyncIterator[pb.GetDecodeTableResponse]:
        yield pb.GetDecodeTableResponse(kind=pb.DECODE_TABLE_KIND_BYTE_LEVEL, special_token_ids=[7], pieces=[b"a"])

    with pytest.raises(Internal):
        await fetch_decode_table(wrong())


def texts_here(kind: str, options: pb.DecodeStreamOpen, portions: list[list[int]], matched: str | None) -> list[str]:
    """Decode as the router does."""
    table = FACTORIES[kind].table
    assert table is not None
    texts: list[str] = []
    state: Any = SimpleNamespace(
        undecoded=0,
        decode_options=options,
        last_batch=None,
        detokenize_seconds=0.0,
        on_text=lambda _, text, __: texts.append(text),
    )
    sequence, detokenizer = ReturnedSequence(state, 0, None), Detokenizer(max_outstanding=1)
    detokenizer.use_table(table)
    for place, ids in enumerate(portions, 1):
        result = common_pb2.SequenceResult(stop_string=matched) if place == len(portions) else None
        batch = Batch()
        detokenizer.add(batch, sequence, list(ids), (), result)
        detokenizer.send(batch)
    assert sequence.decoded == sum(map(len, portions))
    return texts


def texts_there(kind: str, options: pb.DecodeStreamOpen, portions: list[list[int]], matched: str | None) -> list[str]:
    """Decode by a DecodeStream."""
    id_limit = VOCABULARIES[kind].bundle.id_limit
    session = DecodeSession(FACTORIES[kind], DecodeLimits(), serves=lambda _: True, id_limit=id_limit)
    texts = []
    for place, ids in enumerate(portions):
        item = pb.DecodeStreamItem(stream_id=1, token_ids=ids, open=options if place == 0 else None)
        if place == len(portions) - 1:
            item.finish = True
            if matched is not None:
                item.matched_stop_string = matched
        texts.append(session.process(pb.DecodeStreamRequest(items=[item])).results[0].text)
    return texts


@pytest.mark.parametrize("kind", VOCABULARIES)
@given(data=st.data())
@settings(max_examples=75, deadline=None)
def test_the_router_writes_what_the_tokenizer_would(kind: str, data: st.DataObject) -> None:
    limit = VOCABULARIES[kind].bundle.id_limit
    ids = st.lists(st.one_of(st.integers(0, 270), st.integers(0, limit - 1)), max_size=6)
    portions = data.draw(st.lists(ids, min_size=1, max_size=8))
    stops = data.draw(st.lists(st.sampled_from(STOPS), unique=True))
    options = pb.DecodeStreamOpen(
        skip_special_tokens=data.draw(st.sampled_from([None, True, False])),
        stop_strings=stops,
        include_stop_string_in_output=data.draw(st.booleans()),
        prefix_token_ids=data.draw(ids),
    )
    matched = data.draw(st.sampled_from([None, *STOPS]))
    assert texts_here(kind, options, portions, matched) == texts_there(kind, options, portions, matched)
