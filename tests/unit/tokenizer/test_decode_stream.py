"""The multiplexer: contexts, resumed sequences and ends. Messages as they travel, no server."""

from __future__ import annotations

from typing import Any

import pytest
from factories.models.tokenizer_folders import byte_fallback_tokenizer, demo_vocabulary, detokenizers_of, vocabulary_of
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.tokenizer.decode_stream import DecodeLimits, DecodeSession
from penstock.tokenizer.tokenizer import Vocabulary
from penstock.v1 import tokenizer_pb2 as pb

DEMO = demo_vocabulary()
LLAMA = vocabulary_of(byte_fallback_tokenizer())
FACTORIES = {id(vocabulary): detokenizers_of(vocabulary) for vocabulary in (DEMO, LLAMA)}


def session(vocabulary: Vocabulary = DEMO, **limits: int) -> DecodeSession:
    factory, id_limit = FACTORIES[id(vocabulary)], vocabulary.bundle.id_limit
    return DecodeSession(factory, DecodeLimits(**limits), serves=lambda model: model == "", id_limit=id_limit)


def send(to: DecodeSession, **item: Any) -> pb.DecodeStreamResult | None:
    response = to.process(pb.DecodeStreamRequest(items=[pb.DecodeStreamItem(stream_id=1, **item)]))
    return response.results[0] if response.results else None


def ids_of(text: str, vocabulary: Vocabulary = DEMO) -> list[int]:
    ids: list[int] = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def text_of(result: pb.DecodeStreamResult | None) -> str:
    assert result is not None
    assert not result.error
    return result.text


def test_prefix_ids_are_context_and_not_text() -> None:
    prompt, whole_ids = ids_of("hello", LLAMA), ids_of("hello wor", LLAMA)
    answer = whole_ids[len(prompt) :]
    assert whole_ids[: len(prompt)] == prompt
    alone = send(session(LLAMA), open=pb.DecodeStreamOpen(), token_ids=answer, finish=True)
    after = send(session(LLAMA), open=pb.DecodeStreamOpen(prefix_token_ids=prompt), token_ids=answer, finish=True)
    whole = LLAMA.tokenizer.decode([*prompt, *answer])
    assert text_of(after) == whole.removeprefix(LLAMA.tokenizer.decode(prompt))
    assert text_of(alone) == LLAMA.tokenizer.decode(answer)
    assert text_of(alone) != text_of(after)


@pytest.mark.parametrize("prompt", ["def f(x):\n", "鎽龥", "Answer:\n", "你h\n\n"])
def test_bytes_of_the_prompt_are_no_answer_and_match_no_stop_string(prompt: str) -> None:
    before, answer = ids_of(prompt, LLAMA), ids_of("x\nx", LLAMA)
    for context in (before, before[-4:]):
        opened = pb.DecodeStreamOpen(prefix_token_ids=context)
        assert text_of(send(session(LLAMA), open=opened, token_ids=answer, finish=True)) == " x\nx"
        opened.stop_strings.append(prompt[-1])
        stopped = text_of(send(session(LLAMA), open=opened, token_ids=answer, finish=True))
        assert stopped == (" x" if prompt[-1] == "\n" else " x\nx")


@pytest.mark.parametrize("vocabulary", [DEMO, LLAMA], ids=["byte_level", "byte_fallback"])
def test_a_character_that_the_prompt_begins_is_text_only_where_it_is_completed(vocabulary: Vocabulary) -> None:
    ids, letter = ids_of("a鎽", vocabulary), vocabulary.tokenizer.token_to_id("w")
    begun = pb.DecodeStreamOpen(prefix_token_ids=ids[:-1])
    assert len(ids) > 2
    assert text_of(send(session(vocabulary), open=begun, token_ids=ids[-1:], finish=True)) == "鎽"
    assert text_of(send(session(vocabulary), open=begun, token_ids=[letter], finish=True)) == "w"
    assert text_of(send(session(vocabulary), open=begun, finish=True)) == ""
    begun.return_open_end = True
    assert text_of(send(session(vocabulary), open=begun, token_ids=ids[-1:], finish=True)) == "鎽"
    assert set(text_of(send(session(vocabulary), open=begun, finish=True))) == {"\ufffd"}


def test_a_prompt_that_is_cut_inside_of_a_character_leaves_the_answers_run_valid() -> None:
    before, answer = ids_of("鎽龥", LLAMA)[-4:], ids_of("龥", LLAMA)[1:]
    opened = pb.DecodeStreamOpen(prefix_token_ids=before, prefix_is_cut=True)
    assert text_of(send(session(LLAMA), open=opened, token_ids=answer, finish=True)) == "龥"
    # Of a whole prompt they would be the beginning, and make all of the run invalid.
    opened.prefix_is_cut = False
    assert text_of(send(session(LLAMA), open=opened, token_ids=answer, finish=True)) == "\ufffd" * 3


def test_only_special_tokens_before_it_do_not_make_an_answer_the_texts_beginning() -> None:
    opened = pb.DecodeStreamOpen(prefix_token_ids=[1, 2, 1, 2], prefix_is_cut=True)
    assert text_of(send(session(LLAMA), open=opened, token_ids=ids_of("hello", LLAMA), finish=True)) == " hello"
    opened.prefix_is_cut = False
    assert text_of(send(session(LLAMA), open=opened, token_ids=ids_of("hello", LLAMA), finish=True)) == "hello"


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_resumed_sequence_goes_on_exactly_where_it_was(data: st.DataObject) -> None:
    text = data.draw(st.text("ab</end>你👨‍👩 \n", max_size=20))
    ids = ids_of(text)
    cut = data.draw(st.integers(0, len(ids)))
    stops = data.draw(st.sampled_from([[], ["</end>"], ["\n\n", "你a"]]))
    opened = pb.DecodeStreamOpen(stop_strings=stops)
    whole = session()
    first = text_of(send(whole, open=opened, token_ids=ids[:cut]))
    rest = send(whole, token_ids=ids[cut:], finish=True)
    resumed = pb.DecodeStreamOpen(stop_strings=stops, resumed_token_ids=ids[:cut])
    again = send(session(), open=resumed, token_ids=ids[cut:], finish=True)
    assert again == rest
    if not stops:
        assert first + text_of(rest) == text


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    ids = [*ids_of("hi"), DEMO.tokenizer.token_to_id("<|im_end|>")]
    assert text_of(send(session(), open=pb.DecodeStreamOpen(), token_ids=ids)) == "hi"
    kept = pb.DecodeStreamOpen(skip_special_tokens=False)
    assert text_of(send(session(), open=kept, token_ids=ids)) == "hi<|im_end|>"


def test_a_match_is_reported_once_and_ends_the_text() -> None:
    live = session()
    opened = pb.DecodeStreamOpen(stop_strings=["END"], include_stop_string_in_output=True)
    result = send(live, open=opened, token_ids=ids_of("x END y"))
    assert result is not None
    assert (result.text, result.matched_stop_string) == ("x END", "END")
    after = send(live, token_ids=ids_of("z"), finish=True, matched_stop_string="END")
    assert after is not None
    assert (after.text, after.HasField("matched_stop_string")) == ("", False)


def test_the_engines_match_is_cut_even_when_no_stop_string_was_given() -> None:
    result = send(
        session(), open=pb.DecodeStreamOpen(), token_ids=ids_of("x END y"), finish=True, matched_stop_string="END"
    )
    assert result is not None
    assert (result.text, result.matched_stop_string) == ("x ", "END")


def test_a_dropped_sequence_has_no_answer_and_is_forgotten() -> None:
    live = session()
    send(live, open=pb.DecodeStreamOpen(), token_ids=ids_of("x"))
    assert len(live) == 1
    assert send(live, drop=True) is None
    assert len(live) == 0


def test_a_failed_sequence_is_forgotten() -> None:
    live = session()
    send(live, open=pb.DecodeStreamOpen())
    failed = send(live, token_ids=[DEMO.bundle.id_limit])
    assert failed is not None
    assert failed.error.startswith("ID_OUTSIDE_VOCABULARY")
    assert len(live) == 0
    assert send(live, drop=True) is None


@pytest.mark.parametrize(
    ("limits", "opened", "reason"),
    [
        ({"max_sequences": 0}, pb.DecodeStreamOpen(), "TOO_MANY_SEQUENCES"),
        ({"max_stop_string_chars": 2}, pb.DecodeStreamOpen(stop_strings=["abc"]), "INVALID_STOP_STRINGS"),
        ({}, pb.DecodeStreamOpen(stop_strings=[""]), "INVALID_STOP_STRINGS"),
        ({}, pb.DecodeStreamOpen(resumed_token_ids=[1 << 31]), "ID_OUTSIDE_VOCABULARY"),
    ],
)
def test_bounds_end_one_sequence(limits: dict[str, int], opened: pb.DecodeStreamOpen, reason: str) -> None:
    result = send(session(**limits), open=opened)
    assert result is not None
    assert result.error.startswith(reason)


def test_opening_twice_is_an_error() -> None:
    live = session()
    send(live, open=pb.DecodeStreamOpen())
    result = send(live, open=pb.DecodeStreamOpen())
    assert result is not None
    assert result.error.startswith("STREAM_ID_IN_USE")
