"""Tokens that a grammar allows: masks, states, their ends and their failures."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from factories.engine.grammars import EOS, VOCAB_SIZE, accepts, allowed, choice, compiled, ids_of, lark, regex, schema
from hypothesis import example, given, settings
from hypothesis import strategies as st
from penstock.common.errors import InvalidArgument, PenstockError
from penstock.generation.core.grammar import GrammarError
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.grammar.matcher_state import MaskWorkers, MatcherState
from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec

PERSON = schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["é", "b", "bb"]}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
SPECS = [
    PERSON,
    ConstraintSpec(ConstraintKind.JSON_OBJECT),
    regex(r"(\+\d{1,3} )?[0-9]{3}-[a-f]{2,5}|x/y"),
    choice("yes", "no", "yes please", "ja 👋", 'a "quoted" \\ one\n'),
    lark('start: greeting ("," greeting)*\ngreeting: "hello" | "hi" WORD\nWORD: / [a-z]+/'),
    lark('root ::= item{2,3}\nitem ::= [a-z]+ "=" [0-9]+ ";"'),
]
# Deep in a document: a compilation does not come there.
TOO_WIDE: dict[str, Any] = {"type": "object", "properties": {f"k{at}": {"type": "null"} for at in range(2000)}}
IM_START = 4088


def pick(state: MatcherState, draw: random.Random) -> int:
    return draw.choice(sorted(allowed(state)))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind.value)
def test_masks_allow_exactly_what_advance_accepts(spec: ConstraintSpec) -> None:
    draw = random.Random(5)
    for _ in range(4):
        state = compiled(spec).start(EOS)
        for _ in range(25):
            mask = allowed(state)
            assert {token_id for token_id in range(VOCAB_SIZE + 8) if state.copy().advance(token_id)} == mask
            token_id = draw.choice(sorted(mask))
            assert state.advance(token_id)
            if state.is_done or token_id in EOS:
                break


@settings(max_examples=20, deadline=None)
@given(st.integers(0, len(SPECS) - 1), st.integers(0, 10_000), st.integers(0, 12))
def test_copies_go_their_own_way(which: int, seed: int, length: int) -> None:
    draw = random.Random(seed)
    state = compiled(SPECS[which]).start(EOS)
    for _ in range(length):
        if state.is_done:
            return
        token_id = pick(state, draw)
        state.advance(token_id)
    if state.is_done:
        return
    before = allowed(state)
    twin = state.copy()
    assert allowed(twin) == before
    for _ in range(5):
        if twin.is_done:
            break
        twin.advance(pick(twin, draw))
    assert allowed(state) == before
    assert not state.is_done


def test_a_refused_token_changes_nothing() -> None:
    state = compiled(PERSON).start(EOS)
    for token_id in ids_of('{"name": "A'):
        assert state.advance(token_id)
    before = allowed(state)
    assert not state.advance(ids_of("\n")[0])
    assert not state.advance(EOS[0])
    assert not state.advance(VOCAB_SIZE)
    assert allowed(state) == before


def test_the_output_ends_where_it_is_complete() -> None:
    state = compiled(choice("yes", "yes please")).start(EOS)
    for token_id in ids_of("yes"):
        assert not set(EOS) & allowed(state)
        assert state.advance(token_id)
    assert set(EOS) <= allowed(state)
    assert not state.is_done
    assert state.advance(EOS[1])
    for token_id in ids_of(" please"):
        assert state.advance(token_id)
    assert state.is_done
    assert allowed(state) == set(EOS)
    assert not state.advance(ids_of(" ")[0])


def test_the_ids_that_end_an_output_are_the_requests_own() -> None:
    full_stop = ids_of(".")[0]
    state = compiled(regex("[a-z.]*")).start((full_stop,))
    assert full_stop in allowed(state)
    assert not set(EOS) & allowed(state)
    unfinished = compiled(regex("[.]x|y")).start((full_stop,))
    assert full_stop not in allowed(unfinished)
    assert not unfinished.advance(full_stop)


def test_a_request_that_ignores_the_end_goes_on_until_nothing_may_follow() -> None:
    state = compiled(regex("a{2,3}")).ending_itself().start(EOS)
    a = ids_of("a")[0]
    state.advance(a)
    state.advance(a)
    assert not set(EOS) & allowed(state)
    assert not state.is_done
    state.advance(a)
    assert state.is_done


def test_a_grammar_may_name_control_tokens_and_text_never_is_one() -> None:
    state = compiled(lark('start: "a" <|im_start|> "b"')).start(EOS)
    assert state.advance(ids_of("a")[0])
    assert allowed(state) == {IM_START}
    assert state.advance(IM_START)
    anything = allowed(compiled(lark(r"start: /(.|\n)*/")).start(EOS))
    assert not {IM_START, 4090, 4091} & anything


def test_a_grammar_that_names_an_end_token_as_text_still_has_its_own_end() -> None:
    state = compiled(lark('start: "a" <|im_end|> "b"')).ending_itself().start(EOS)
    state.advance(ids_of("a")[0])
    assert allowed(state) == {EOS[0]}
    assert state.advance(EOS[0])
    assert state.advance(ids_of("b")[0])
    assert state.is_done


@pytest.mark.parametrize("values", [("a", "ab", "abc"), ("\x00", "\n", "\t\\"), ("/x/", '"', "'"), ("🐨", "é", "你好")])
def test_a_choice_is_its_values_and_nothing_else(values: tuple[str, ...]) -> None:
    grammar = compiled(choice(*values))
    for value in values:
        assert accepts(grammar, value)
        assert not accepts(grammar, value + "!")
    assert not accepts(grammar, "")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), min_size=1, max_size=5, unique=True))
@example(["\uf900"])  # NFC, which the tokenizer applies to what it encodes, makes another character of it.
def test_any_text_can_be_a_choice(values: list[str]) -> None:
    grammar = compiled(choice(*values))
    assert all(accepts(grammar, value) for value in values)


def test_white_space_in_json_is_bounded_unless_the_schema_says_otherwise() -> None:
    # Behind a comma or a colon only: real models spend any other.
    loose = compiled(schema({"type": "array"}))
    assert accepts(loose, "[1, 2,\n" + " " * 32 + "3,4]")
    for text in ("[1 , 2]", "[1\n,2]", "[1,  2]", "[1,\n\n2]", "[1,\n" + " " * 33 + "2]", "[ 1]", "[1 ]"):
        assert not accepts(loose, text), text
    own = compiled(schema({"x-guidance": {"whitespace_pattern": "\\n {0,4}"}, "type": "array"}))
    assert accepts(own, "[\n    1\n]")
    assert not accepts(own, "[\n     1]")
    tight = compiled(schema({"x-guidance": {"whitespace_flexible": False}, "type": "array"}))
    assert accepts(tight, "[1,2]")
    assert not accepts(tight, "[1, 2]")


@pytest.mark.parametrize("value", [{}, {"a": {"b": [1, None, True, "x"]}}])
def test_json_object_is_any_object(value: object) -> None:
    grammar = compiled(ConstraintSpec(ConstraintKind.JSON_OBJECT))
    assert accepts(grammar, json.dumps(value))
    assert not accepts(grammar, json.dumps([value]))


def test_a_dead_end_fails_its_request_and_says_so() -> None:
    # Complete after `a` and unable to end, since the only continuation is the id that ends outputs.
    state = compiled(lark('start: "a" <|im_end|> "b"')).start((EOS[0],))
    state.advance(ids_of("a")[0])
    assert len(allowed(state)) == VOCAB_SIZE
    with pytest.raises(InvalidArgument) as raised:
        state.advance(EOS[0])
    assert (raised.value.field, raised.value.reason) == ("constraint.grammar", "CONSTRAINT_DEAD_END")
    with pytest.raises(PenstockError):
        state.copy().advance(1)


@pytest.mark.parametrize("word", ["advance", "mask"])
def test_a_place_of_too_many_ways_is_the_constraints_fault_and_not_the_services(word: str) -> None:
    wide = schema({"type": "object", "properties": {"a": {"type": "string"}, "b": TOO_WIDE}, "required": ["a", "b"]})
    state = compiled(wide).start(EOS)

    def write(text: str) -> None:
        for token_id in ids_of(text):
            if word == "mask":
                allowed(state)
            state.advance(token_id)

    with pytest.raises(InvalidArgument, match="too complex") as raised:
        write('{"a": "some words", "b": {"k0": null}}')
    assert (raised.value.field, raised.value.reason) == ("constraint.json_schema", "CONSTRAINT_TOO_COMPLEX")


def test_an_object_of_a_thousand_keys_that_may_be_left_out_is_written() -> None:
    wide = {**TOO_WIDE, "properties": dict(itertools.islice(TOO_WIDE["properties"].items(), 1000))}
    grammar = compiled(schema({"type": "array", "items": wide}))
    assert accepts(grammar, '[{"k0": null, "k999": null}, {"k500": null}, {}]')


def test_a_sequence_never_takes_a_token_that_its_grammar_refuses() -> None:
    params = SamplingParams(max_new_tokens=4)
    sequence = Sequence(0, 0, params, 0, [1], 1, grammar=compiled(regex("ab")).start(EOS))
    with pytest.raises(GrammarError):
        sequence.append(ids_of("x")[0])


def test_many_masks_at_once_are_those_of_one_at_a_time() -> None:
    draw = random.Random(1)
    states = [compiled(spec).start(EOS) for spec in SPECS for _ in range(3)]
    workers = MaskWorkers(VOCAB_SIZE, num_threads=2)
    words = np.zeros((len(states), workers.num_words), dtype=np.int32)
    for _ in range(8):
        workers.fill(states, words)
        for state, row in zip(states, words, strict=True):
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            assert set(np.flatnonzero(bits).tolist()) == allowed(state)
            if not state.is_done:
                state.advance(pick(state, draw))
