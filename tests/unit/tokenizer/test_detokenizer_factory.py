"""Incremental decoding: whatever the portions, the texts together are the one-shot decode, in whole characters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from factories.models.tokenizer_folders import (
    byte_fallback_tokenizer,
    demo_vocabulary,
    detokenizers_of,
    unigram_tokenizer,
    vocabulary_of,
    word_piece_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.text.decode_table import Table
from penstock.text.detokenizer import ByteLevelDetokenizer, SequenceDetokenizer
from penstock.tokenizer.decoder_plan import byte_level_bytes
from penstock.tokenizer.detokenizer_factory import DetokenizerFactory
from penstock.tokenizer.tokenizer import TextTokenizer, Vocabulary
from tokenizers import AddedToken, Tokenizer, normalizers

MULTI_BYTE = [
    "你好，世界。这是一个测试",
    "日本語の形態素解析は難しい",
    "👨‍👩‍👧‍👦 👍🏽 🇯🇵🇰🇷 🏳️‍🌈",
    "e\u0301 n\u0303 a\u0308\u0323 ก็ नि दे",
    "naïve café — «œuvre»",
    "مرحبا بالعالم",
]
VOCABULARIES: dict[str, Vocabulary] = {
    "byte_level": demo_vocabulary(),
    "byte_fallback": vocabulary_of(byte_fallback_tokenizer()),
}
FACTORIES = {name: detokenizers_of(vocabulary) for name, vocabulary in VOCABULARIES.items()}


def stream(detokenizer: SequenceDetokenizer, portions: Sequence[Sequence[int]]) -> list[str]:
    return [*(detokenizer.push(portion) for portion in portions), detokenizer.finish()]


def split_at(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    bounds = [0, *sorted(cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize(
    ("vocabulary", "pieces"),
    [
        (
            VOCABULARIES["byte_fallback"],
            {"▁w": b" w", "<0xE4>": b"\xe4", "<0x41>": b"A", "你": "你".encode(), "<s>": b"<s>"},
        ),
        (vocabulary_of(unigram_tokenizer()), {"▁": b" ", "hello": b"hello", "</s>": b"</s>"}),
        (vocabulary_of(word_piece_tokenizer()), {"hello": b"hello", "[SEP]": b"[SEP]"}),
        (VOCABULARIES["byte_level"], {"Ġthe": b" the", "ð": b"\xf0", "<|im_end|>": b"<|im_end|>"}),
    ],
    ids=["byte_fallback", "metaspace", "word_piece", "byte_level"],
)
def test_a_token_alone_is_its_own_bytes_within_a_text(vocabulary: Vocabulary, pieces: dict[str, bytes]) -> None:
    factory = detokenizers_of(vocabulary)
    ids = {token: vocabulary.tokenizer.token_to_id(token) for token in pieces}
    assert None not in ids.values()
    assert {token: factory.piece(index) for token, index in ids.items()} == pieces
    with pytest.raises(IndexError):
        factory.piece(1 << 20)


class CountedTokenizer:
    """A tokenizer that counts how often it makes its added tokens, which are thousands in some."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.asked = 0

    def get_added_tokens_decoder(self) -> Any:
        self.asked += 1
        return self._tokenizer.get_added_tokens_decoder()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_added_tokens_are_made_once_for_all_ids() -> None:
    vocabulary = vocabulary_of(word_piece_tokenizer())
    counted = CountedTokenizer(vocabulary.tokenizer)
    factory = DetokenizerFactory(
        cast("Tokenizer", counted), id_limit=vocabulary.bundle.id_limit, special_ids=(), clean_up=None
    )
    begun = counted.asked
    for index in range(vocabulary.tokenizer.get_vocab_size()):
        factory.piece(index)
    assert (begun, counted.asked) == (1, 1)


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_tables_serve_the_common_decoders(kind: str) -> None:
    assert FACTORIES[kind].kind == kind


@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize("text", MULTI_BYTE)
def test_every_split_of_multi_byte_text_adds_up(kind: str, text: str) -> None:
    vocabulary = VOCABULARIES[kind]
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    whole = vocabulary.tokenizer.decode(ids)
    for cut in range(len(ids) + 1):
        parts = stream(FACTORIES[kind].make(True), [ids[:cut], ids[cut:]])
        assert "".join(parts) == whole
        assert "\ufffd" not in "".join(parts)
    assert "".join(stream(FACTORIES[kind].make(True), [[index] for index in ids])) == whole


@pytest.mark.parametrize("kind", VOCABULARIES)
@given(data=st.data())
@settings(max_examples=75, deadline=None)
def test_any_ids_in_any_portions_equal_the_one_shot_decode(kind: str, data: st.DataObject) -> None:
    vocabulary = VOCABULARIES[kind]
    # The first ids are the bytes: runs that are no valid UTF-8 are what this is about.
    ids = data.draw(
        st.lists(st.one_of(st.integers(0, 270), st.integers(0, vocabulary.bundle.id_limit - 1)), max_size=24)
    )
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    skip = data.draw(st.booleans())
    parts = stream(FACTORIES[kind].make(skip), split_at(ids, cuts))
    assert "".join(parts) == vocabulary.tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.binary(max_size=24), cuts=st.lists(st.integers(0, 24), max_size=6))
@settings(max_examples=100, deadline=None)
def test_invalid_bytes_become_the_replacements_that_rust_writes(data: bytes, cuts: list[int]) -> None:
    # Python and Rust both replace maximal subparts (Unicode 3.9, U+FFFD substitution); here, byte by byte.
    table = Table([None] * 256, {byte: bytes([byte]) for byte in range(256)})
    parts = stream(ByteLevelDetokenizer(table), split_at(list(data), cuts))
    assert "".join(parts) == data.decode("utf-8", "replace")


def test_no_half_character_is_emitted_and_no_whole_one_withheld() -> None:
    ids = VOCABULARIES["byte_level"].tokenizer.encode("👨‍👩‍👧").ids
    detokenizer = FACTORIES["byte_level"].make(True)
    sent = ""
    for count, index in enumerate(ids, 1):
        sent += detokenizer.push([index])
        raw = b"".join(byte_level_bytes(VOCABULARIES["byte_level"].tokenizer.id_to_token(one)) for one in ids[:count])
        assert sent == raw.decode("utf-8", "ignore")


def test_an_incomplete_character_at_the_end_is_a_replacement() -> None:
    ids = VOCABULARIES["byte_level"].tokenizer.encode("👨").ids
    assert stream(FACTORIES["byte_level"].make(True), [ids[:-1]])[-1] == "\ufffd"


def test_a_run_of_fallback_bytes_waits_for_its_end() -> None:
    tokenizer = VOCABULARIES["byte_fallback"].tokenizer
    run, end = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "好".encode()], tokenizer.token_to_id("h")
    detokenizer = FACTORIES["byte_fallback"].make(True)
    assert [detokenizer.push([index]) for index in [*run, end]] == ["", "", "", "好h"]


def test_ids_of_padded_embedding_rows_decode_to_nothing() -> None:
    vocabulary = vocabulary_of(byte_fallback_tokenizer(), id_limit=400)
    assert detokenizers_of(vocabulary).make(True).push([399]) == ""
    with pytest.raises(IndexError):
        detokenizers_of(vocabulary).make(True).push([400])


@pytest.mark.parametrize(
    ("vocabulary", "text"),
    [
        (vocabulary_of(unigram_tokenizer()), "hello world. hello"),
        (vocabulary_of(word_piece_tokenizer()), "hello worlds, hello"),
        (vocabulary_of(word_piece_tokenizer(), clean_up_tokenization_spaces=True), "hello world . hello ' s"),
    ],
    ids=["unigram", "word_piece", "word_piece_cleaned_up"],
)
def test_decoders_without_a_table_are_run_over_a_window(vocabulary: Vocabulary, text: str) -> None:
    factory = detokenizers_of(vocabulary)
    assert factory.kind == "window"
    ids = vocabulary.tokenizer.encode(text).ids
    whole = TextTokenizer(vocabulary).decode([ids], True)[0]
    for cut in range(len(ids) + 1):
        assert "".join(stream(factory.make(True), [ids[:cut], ids[cut:]])) == whole


@pytest.mark.parametrize("make", [byte_fallback_tokenizer, unigram_tokenizer])
def test_a_special_token_that_a_normalizer_changes_is_decoded_as_in_the_one_shot_decode(
    make: Callable[[], Tokenizer],
) -> None:
    tokenizer = make()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken("<SP>", normalized=True), AddedToken("<t>", normalized=True)])
    vocabulary = vocabulary_of(tokenizer)
    ids = [tokenizer.token_to_id(token) for token in ("h", "<SP>", "<t>", "e")]
    for skip in (True, False):
        parts = stream(detokenizers_of(vocabulary).make(skip), [[index] for index in ids])
        assert "".join(parts) == TextTokenizer(vocabulary).decode([ids], skip)[0]


def test_the_clean_up_of_spaces_takes_the_prompts_without_returning_its_text() -> None:
    factory = detokenizers_of(vocabulary_of(word_piece_tokenizer(), clean_up_tokenization_spaces=True))
    ids = {word: factory._tokenizer.token_to_id(word) for word in ("hello", "'", "s", ".", "world")}
    for prompt, answer, text in (("hello", ". world", ". world"), ("hello '", "s .", "s."), ("hello", "' s", "'s")):
        detokenizer = factory.make(True)
        detokenizer.begin([ids[word] for word in prompt.split()])
        assert "".join(stream(detokenizer, [[ids[word]] for word in answer.split()])) == text


def test_a_space_that_the_clean_up_took_from_the_prompt_is_not_taken_from_the_answer() -> None:
    bundle = demo_vocabulary().bundle
    factory = detokenizers_of(Vocabulary(replace(bundle, clean_up_tokenization_spaces=True)))
    before, ids = [demo_vocabulary().tokenizer.encode(text).ids for text in (" ' ", " x")]
    detokenizer = factory.make(True)
    assert detokenizer.begin(before) == "'"
    assert "".join(stream(detokenizer, [ids])) == " x"
