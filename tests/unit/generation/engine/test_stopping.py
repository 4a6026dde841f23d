"""End of a sequence: on the very token that completes a stop, compared with a search in the decoded text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories.engine.fake_engine import make_engine, request, run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from penstock.generation.core.request import FinishReason, SequenceFinish
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.engine.stopping import Stop, StopCriteria, StopStringAutomaton
from penstock.text.thoughts import Thought
from penstock.text.token_bytes import Leading, TextCursor, TokenBytes

# Tokens that cut characters and stop strings anywhere.
PIECES = [
    b"s", b"t", b"st", b"op", b"stopper", b" ", b"<", b"|", b"<|end", b"|>", b"\xe4", b"\xb8", b"\xad", b"\xe4\xb8",
    b"\xf0\x9f", b"\x98\x80", b"\n\n", b"\n", b"stops", b"p", b"[special]",
]  # fmt: skip
TABLE = TokenBytes(dict(enumerate(PIECES)), special=[20])
STRINGS = ["stop", "st", "top", "<|end|>", "中", "😀", "\n\n", "p s", "ts", "stopstop", " st"]


def criteria(table: TokenBytes = TABLE, limit: int = 100, **options: object) -> StopCriteria:
    return StopCriteria(replace(SamplingParams(limit), **options), limit, table)  # type: ignore[arg-type]


def first_stop(judge: StopCriteria, ids: list[int], prompt: list[int] | None = None) -> tuple[int, Stop] | None:
    """Return the number of tokens until it ends, and the reason."""
    prompt = prompt or [0]
    sequence = Sequence(0, 0, SamplingParams(1), 0, list(prompt), len(prompt))
    state = judge.new_state()
    for count, token_id in enumerate(ids, 1):
        sequence.token_ids.append(token_id)
        stop = judge.check(sequence, state)
        if stop is not None:
            return count, stop
    return None


def test_stop_strings_that_nothing_can_match_are_no_criteria() -> None:
    """Without a table of the tokens' bytes they would never end anything."""
    with pytest.raises(ValueError, match="stop strings"):
        StopCriteria(SamplingParams(9, stop_strings=("stop",)), 9, None)
    engine, _ = make_engine()
    with pytest.raises(ValueError, match="stop strings"):
        engine.add(request([1], stop_strings=("stop",)))
    assert not engine.has_work


def naive(table: TokenBytes, ids: list[int], strings: tuple[str, ...]) -> tuple[int, str] | None:
    """Search the decoded text of every prefix for the string that ends first; of several the longest."""
    for count in range(1, len(ids) + 1):
        cursor = TextCursor(table, skip_special=True)
        text = b"".join(cursor.feed(token_id) for token_id in ids[:count]).decode(errors="replace")
        found = [(text.find(string) + len(string), -len(string), string) for string in strings if string in text]
        if found:
            return count, min(found)[2]
    return None


@settings(max_examples=75, deadline=None)
@given(
    st.lists(st.integers(0, len(PIECES)), max_size=30),
    st.lists(st.sampled_from(STRINGS), min_size=1, max_size=4, unique=True).map(tuple),
    st.sampled_from(list(Leading)),
)
@example([2, 4, 7], ("stopstop",), Leading.KEEP)
@example([10, 11, 12], ("中",), Leading.KEEP)
@example([5, 2], (" st",), Leading.STRIP_ONE)
@example([10, 13, 12], ("中",), Leading.KEEP)
def test_stop_strings_end_where_a_search_in_the_decoded_text_first_finds_one(
    ids: list[int], strings: tuple[str, ...], leading: Leading
) -> None:
    table = TokenBytes(dict(enumerate(PIECES)), special=[20], leading=leading)
    ended = first_stop(criteria(table, stop_strings=strings), ids)
    expected = naive(table, ids, strings)
    assert (None if ended is None else (ended[0], ended[1].string)) == expected


@settings(max_examples=40, deadline=None)
@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5, unique=True))
def test_the_automaton_finds_what_ends_first_and_of_those_the_longest(text: str, strings: list[str]) -> None:
    _, matched = StopStringAutomaton(tuple(strings)).scan(0, text.encode())
    found = [(text.find(string) + len(string), -len(string), string) for string in strings if string in text]
    assert (strings[matched] if matched >= 0 else None) == (min(found)[2] if found else None)


def test_a_stop_string_may_be_completed_in_the_middle_of_a_token() -> None:
    assert first_stop(criteria(stop_strings=("top",)), [5, 4, 0]) == (2, Stop(FinishReason.STOP_STRING, string="top"))


def test_the_prompt_takes_no_part_in_a_match() -> None:
    assert first_stop(criteria(stop_strings=("stop",)), [3], prompt=[2]) is None
    params = SamplingParams(9, stop_strings=("stop",))
    assert first_stop(StopCriteria(params, 9, TABLE, [2]), [3], prompt=[2]) is None
    assert first_stop(criteria(stop_token_ids=((2, 3),)), [3], prompt=[2]) is None


def test_skipped_special_tokens_are_no_text_and_shown_ones_are() -> None:
    ids = [2, 20, 3]
    assert first_stop(criteria(stop_strings=("stop",)), ids) == (3, Stop(FinishReason.STOP_STRING, string="stop"))
    shown = criteria(stop_strings=("stop", "[spec"), skip_special_tokens=False)
    assert first_stop(shown, ids) == (2, Stop(FinishReason.STOP_STRING, string="[spec"))


def test_an_end_of_sequence_id_ends_and_names_itself_unless_ignored() -> None:
    assert first_stop(criteria(eos_token_ids=(7, 9)), [1, 9, 1]) == (2, Stop(FinishReason.STOP_EOS, token_id=9))
    assert first_stop(criteria(eos_token_ids=(7, 9), ignore_eos=True), [1, 9, 1]) is None


def test_a_sequence_of_stop_ids_must_be_complete_and_adjacent() -> None:
    judge = criteria(stop_token_ids=((4, 5, 6), (8,)))
    assert first_stop(judge, [4, 5, 1, 6, 4, 5, 6]) == (7, Stop(FinishReason.STOP_TOKEN, token_id=6))
    assert first_stop(judge, [8]) == (1, Stop(FinishReason.STOP_TOKEN, token_id=8))


def test_on_one_token_the_more_telling_reason_wins() -> None:
    everything = criteria(limit=1, eos_token_ids=(2,), stop_token_ids=((2,),), stop_strings=("st",))
    assert first_stop(everything, [2]) == (1, Stop(FinishReason.STOP_EOS, token_id=2))
    text_and_length = criteria(limit=1, stop_strings=("st",))
    assert first_stop(text_and_length, [2]) == (1, Stop(FinishReason.STOP_STRING, string="st"))
    assert first_stop(criteria(limit=2), [2, 2]) == (2, Stop(FinishReason.LENGTH))


def test_a_forked_state_goes_on_from_the_same_text() -> None:
    judge = criteria(stop_strings=("stop",))
    sequence = Sequence(0, 0, SamplingParams(1), 0, [0, 2], 1)
    state = judge.new_state()
    assert judge.check(sequence, state) is None
    twin = state.copy()
    sequence.token_ids.append(3)
    assert judge.check(sequence, state) is not None
    assert judge.check(sequence, twin) is not None


@pytest.mark.parametrize("resumed", [[], [[2]], [[1, 2]]])
def test_the_engine_ends_on_the_very_token_and_counts_nothing_after_it(resumed: list[list[int]]) -> None:
    # Output by position: t, st, op (completes "stop"), s, ...
    engine, _ = make_engine(script={0: 1, 1: 2, 2: 3, 3: 0, 4: 0}, stop_text=TABLE)
    resumed = [[1, 2]] if resumed == [[1, 2]] else []
    answers = run(engine, item := request([9], stop_strings=("stop",), max_new_tokens=50, resumed_token_ids=resumed))
    answer = answers[item.request_id]
    assert answer.ids == {0: [1, 2, 3][len(resumed[0]) if resumed else 0 :]}
    assert answer.finished is not None
    assert answer.finished.sequences == (SequenceFinish(0, FinishReason.STOP_STRING, 3, stop_string="stop"),)
    assert answer.finished.completion_tokens == 3


class Spelling:
    """A grammar state: the output must be the beginning of `text`."""

    def __init__(self, text: tuple[int, ...], place: int = 0) -> None:
        self.text, self.place = text, place

    is_cut = False

    @property
    def is_free(self) -> bool:
        return False

    @property
    def is_done(self) -> bool:
        return self.place == len(self.text)

    def advance(self, token_id: int) -> bool:
        allowed = not self.is_done and self.text[self.place] == token_id
        self.place += allowed
        return allowed

    def copy(self) -> Spelling:
        return Spelling(self.text, self.place)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12),
    st.lists(st.sampled_from(STRINGS), max_size=3, unique=True).map(tuple),
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    st.sampled_from([(), (0,), (3, 5)]),
    st.booleans(),
)
def test_a_candidate_is_judged_as_it_would_be_once_appended_and_leaves_no_trace(
    ids: list[int],
    strings: tuple[str, ...],
    stop_ids: tuple[tuple[int, ...], ...],
    eos: tuple[int, ...],
    has_grammar: bool,
) -> None:
    judge = criteria(limit=10, stop_strings=strings, stop_token_ids=stop_ids, eos_token_ids=eos)
    sequence = Sequence(0, 0, SamplingParams(1), 0, [2, 4], 2)
    if has_grammar:
        sequence.grammar = Spelling(tuple(ids))
    state = judge.new_state()
    for token_id in ids:
        foreseen = [judge.check_candidate(sequence, token_id, state) for _ in range(2)]
        sequence.append(token_id)
        stop = judge.check(sequence, state)
        assert foreseen == [stop, stop]
        if stop is not None:
            return


def test_the_text_of_an_output_goes_on_from_its_prompts() -> None:
    table = TokenBytes(dict(enumerate(PIECES)), special=[20], leading=Leading.STRIP_ONE)
    # A space and "st"; a character that the prompt begins.
    for prompt, ids, string in (([2], [5, 2], " st"), ([0, 10, 11], [12], "中")):
        params = SamplingParams(9, stop_strings=(string,))
        after, anew = (first_stop(StopCriteria(params, 9, table, context), ids, prompt) for context in (prompt, ()))
        assert after == (len(ids), Stop(FinishReason.STOP_STRING, string=string))
        assert anew is None


@pytest.mark.parametrize(("begins_text", "reason"), [(True, FinishReason.LENGTH), (False, FinishReason.STOP_STRING)])
def test_a_request_says_whether_its_text_begins_anew(begins_text: bool, reason: FinishReason) -> None:
    table = TokenBytes({7: b"a", 8: b" a"}, special=[], leading=Leading.STRIP_ONE)
    wanted = request([7], max_new_tokens=1, stop_strings=(" a",))
    wanted.begins_text = begins_text
    engine, _ = make_engine(script={0: 8}, stop_text=table)
    finished = run(engine, wanted)[wanted.request_id].finished
    assert finished is not None
    assert finished.sequences[0].reason is reason


@pytest.mark.parametrize("is_open", [True, False])
def test_stop_strings_do_not_end_the_thought_before_an_answer(is_open: bool) -> None:
    stop, opens, closes = 4, [6, 17], [20]
    thought = Thought("<\n", ("[special]",), is_open=is_open)
    judge = StopCriteria(SamplingParams(100, stop_strings=("stop",)), 100, TABLE, (), thought)
    inside = [stop, *closes] if is_open else [*opens, stop, *closes]
    # A marker that is no text ends the thought; half a stop string within it is none.
    assert first_stop(judge, [*inside, 5, stop]) == (len(inside) + 2, Stop(FinishReason.STOP_STRING, string="stop"))
    assert first_stop(judge, [*inside[:-1], 2, 20, 3]) is None
    # What begins as a thought and is none counts from its first character.
    other = StopCriteria(SamplingParams(100, stop_strings=("<s",)), 100, TABLE, (), Thought("<\n", ("x",)))
    assert first_stop(other, [6, 0, 5]) == (2, Stop(FinishReason.STOP_STRING, string="<s"))


def test_a_thought_may_end_within_a_token_and_a_candidate_changes_nothing() -> None:
    table = TokenBytes({0: b"<t", 1: b"> stop", 2: b"stop", 3: b"/t"}, special=[])
    judge = StopCriteria(SamplingParams(9, stop_strings=("stop",)), 9, table, (), Thought("<t", ("/t>",)))
    sequence, state = Sequence(0, 0, SamplingParams(1), 0, [5], 1), judge.new_state()
    for token_id in (0, 2, 3):
        assert judge.check_candidate(sequence, 2, state) == (
            None if sequence.num_output_tokens else Stop(FinishReason.STOP_STRING, string="stop")
        )
        sequence.token_ids.append(token_id)
        assert judge.check(sequence, state) is None
    ended = Stop(FinishReason.STOP_STRING, string="stop")
    assert judge.check_candidate(sequence, 1, state) == ended
    sequence.token_ids.append(1)
    assert judge.check(sequence, state) == ended
