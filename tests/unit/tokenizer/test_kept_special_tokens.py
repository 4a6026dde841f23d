"""Special tokens that a reader of the text needs, such as markers of tool calls: they stay, the others do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from factories.models.tokenizer_folders import (
    byte_fallback_tokenizer,
    demo_vocabulary,
    detokenizers_of,
    unigram_tokenizer,
    vocabulary_of,
    word_piece_tokenizer,
)
from penstock.tokenizer.decode_stream import DecodeLimits, DecodeSession
from penstock.v1 import tokenizer_pb2 as pb
from tokenizers import Tokenizer

KEPT, DROPPED = "[TOOL_CALLS]", "<|turn_over|>"
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": lambda: Tokenizer.from_str(demo_vocabulary().tokenizer.to_str()),
    "byte_fallback": byte_fallback_tokenizer,
    "unigram": unigram_tokenizer,
    "word_piece": word_piece_tokenizer,
}


def decoded(tokenizer: Tokenizer, ids: list[int], kept: list[str], size: int) -> str:
    """Return the text of a DecodeStream that gets `size` ids at a time."""
    vocabulary = vocabulary_of(tokenizer)
    session = DecodeSession(
        detokenizers_of(vocabulary), DecodeLimits(), serves=lambda _: True, id_limit=vocabulary.bundle.id_limit
    )
    opened = pb.DecodeStreamOpen(skip_special_tokens=True, kept_special_tokens=kept)
    text = ""
    for start in range(0, len(ids), size):
        item = pb.DecodeStreamItem(stream_id=1, token_ids=ids[start : start + size], finish=start + size >= len(ids))
        if not start:
            item.open.CopyFrom(opened)
        for result in session.process(pb.DecodeStreamRequest(items=[item])).results:
            assert not result.error
            text += result.text
    return text


@pytest.mark.parametrize("size", [1, 2, 99])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_only_what_is_kept_stays(kind: str, size: int) -> None:
    tokenizer = TOKENIZERS[kind]()
    tokenizer.add_special_tokens([KEPT, DROPPED])
    kept, dropped = tokenizer.token_to_id(KEPT), tokenizer.token_to_id(DROPPED)
    words = tokenizer.encode("hello", add_special_tokens=False).ids
    ids = [*words, kept, *words, dropped, *words, kept]
    plain = decoded(tokenizer, ids, [], size)
    text = decoded(tokenizer, ids, [KEPT, "not in the vocabulary"], size)
    assert KEPT not in plain
    assert (text.count(KEPT), DROPPED in text) == (2, False)
    # As the tokenizer itself decodes the ids without the one that is skipped.
    assert text == tokenizer.decode([one for one in ids if one != dropped], skip_special_tokens=False)
