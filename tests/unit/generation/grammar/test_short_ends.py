"""Outputs that end within their limit of tokens: whole where an end fits, and the model's own until little is left."""

from __future__ import annotations

import itertools
import json
import random
import string
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from factories.engine.grammars import (
    EOS,
    allowed,
    compiled,
    grammar_tokenizer,
    held,
    ids_of,
    lark,
    regex,
    schema,
    text_tokenizer,
)
from factories.models.byte_tokenizer import save_byte_tokenizer
from factories.wire.pydantic_models import model_of
from penstock.generation.core.grammar import GrammarState
from penstock.generation.grammar.grammar_tokenizer import GrammarTokenizer
from penstock.generation.grammar.matcher_state import CompiledGrammar
from penstock.generation.grammar.matching import new_matcher
from penstock.generation.grammar.short_ends import ShortEnds
from penstock.generation.grammar.spec import ConstraintSpec
from penstock.generation.grammar.translate import to_lark
from penstock.router.chat.chat_output import make_parser
from penstock.router.chat.forced_calls import forced_grammar, held_grammar
from penstock.router.chat.formats import TOOLS, choose_format
from penstock.text.thoughts import Thought

ITEMS = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "price": {"type": "number"}, "kind": {"enum": ["a", "bcd"]}},
                "required": ["name", "price", "kind"],
            },
        },
        "note": {"type": ["string", "null"]},
    },
    "required": ["title", "items"],
}
DIGITS = {
    "type": "object",
    "properties": {"digits": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}}},
    "required": ["digits"],
    "additionalProperties": False,
}
TOOL = {
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "mode": {"type": "integer"}},
        "required": ["path", "text", "mode"],
        "additionalProperties": False,
    }
}


def drawn(grammar: Any, most: int, seed: int, begin: str = "") -> tuple[str, GrammarState]:
    """Return an output of at most `most` tokens, of a model that never wants to end, and its state."""
    state, draw, ids = grammar.start(EOS, most), random.Random(seed), list[int]()
    for token_id in ids_of(begin):
        assert state.advance(token_id)
        ids.append(token_id)
    while len(ids) < most and not state.is_done and not (begin and state.is_free):
        choices = sorted(allowed(state))
        ids.append(draw.choice([one for one in choices if one not in EOS] or choices))
        assert state.advance(ids[-1])
        if ids[-1] in EOS:
            ids.pop()
            break
    return str(text_tokenizer().decode(ids, skip_special_tokens=False)), state


@pytest.mark.parametrize("most", [120, 200, 500])
def test_json_is_whole_within_its_limit(most: int) -> None:
    for seed in range(4):
        text, state = drawn(compiled(schema(ITEMS)), most, seed)
        jsonschema.validate(json.loads(text), ITEMS)
        assert state.is_done


def test_an_end_that_the_limit_dictates_is_told() -> None:
    _, state = drawn(compiled(schema({"type": "object", "properties": {"a": {"type": "string"}}})), 100, 1, '{"a": "b')
    assert state.is_cut
    short = compiled(schema({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}))
    _, state = drawn(short, 100, 1)
    assert (state.is_done, state.is_cut) == (True, False)


def list_of_digits(most: int, wanted: str) -> tuple[str, GrammarState]:
    """Return a list by a model that writes `wanted`, as far as the mask allows, and its state."""
    state = compiled(schema(DIGITS)).start(EOS, most)
    text, tokenizer = "", text_tokenizer()
    while not state.is_done:
        pieces = {token_id: tokenizer.decode([token_id]) for token_id in allowed(state)}
        # The token that goes furthest along with it; else one that ends something.
        fits = [one for one, piece in pieces.items() if piece and wanted.startswith(text + piece)]
        closes = [one for one, piece in pieces.items() if piece and not piece.strip(" \n]}")]
        chosen = max(fits or closes, key=lambda one: len(pieces[one]))
        assert state.advance(chosen)
        text += pieces[chosen]
    return text, state


def test_a_list_that_ends_since_no_item_has_room_is_told() -> None:
    wanted = '{"digits": [' + ",".join("7" * 200) + "]}"
    for most in (60, 100, 200):
        text, state = list_of_digits(most, wanted)
        assert 3 < len(json.loads(text)["digits"]) < 200
        assert state.is_cut


def test_a_list_that_the_model_ends_before_is_its_own() -> None:
    wanted = '{"digits": [7,7,7]}'
    text, state = list_of_digits(100, wanted)
    assert (text, state.is_cut) == (wanted, False)


def test_an_object_with_all_of_its_keys_is_the_models_own_up_to_the_limit() -> None:
    document = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    grammar = compiled(schema(document))
    ids = ids_of('{"a": true, "b": false}')
    state = grammar.start(EOS, len(ids) + 4)
    assert all(state.advance(token_id) for token_id in ids)
    assert (state.is_done, state.is_cut) == (True, False)


def test_a_limit_without_room_for_any_end_cuts_as_before() -> None:
    grammar = compiled(schema(ITEMS))
    for most in (1, 4, 8):
        state, free = grammar.start(EOS, most), grammar.start(EOS)
        for token_id in ids_of('{"title": "x')[:most]:
            assert allowed(state) == allowed(free)
            assert state.advance(token_id)
            assert free.advance(token_id)


def test_a_grammar_that_the_limit_cuts_is_never_narrower() -> None:
    grammar = compiled(schema(DIGITS))
    state, free = grammar.cut_by_limit().start(EOS, 30), grammar.start(EOS)
    for token_id in ids_of('{"digits": [' + "7," * 40)[:30]:
        assert allowed(state) == allowed(free)
        assert state.advance(token_id)
        assert free.advance(token_id)
    assert not state.is_cut


def test_until_little_is_left_the_mask_is_the_grammars() -> None:
    grammar = compiled(schema(ITEMS))
    state, free = grammar.start(EOS, 400), grammar.start(EOS)
    ids = ids_of('{"title": "A list", "items": [' + '{"name": "tea", "price": 1.5, "kind": "a"}, ' * 12)
    for token_id in ids[:300]:
        assert allowed(state) == allowed(free)
        assert state.advance(token_id)
        assert free.advance(token_id)


def test_an_output_that_may_end_anywhere_is_not_ended() -> None:
    text, state = drawn(compiled(regex("[0-9]+")), 12, 0)
    assert not state.is_cut
    assert len(ids_of(text)) <= 12
    assert len(text) >= 12


def test_a_copy_and_a_replay_come_to_the_same() -> None:
    grammar = compiled(schema(ITEMS))
    state, draw, ids = grammar.start(EOS, 80), random.Random(3), list[int]()
    while not state.is_done:
        replayed = grammar.start(EOS, 80)
        assert all(replayed.advance(token_id) for token_id in ids)
        masks = [allowed(one) for one in (state, state.copy(), replayed)]
        assert masks[0] == masks[1] == masks[2]
        ids.append(draw.choice(sorted(masks[0] - set(EOS))))
        assert state.advance(ids[-1])
    assert len(ids) <= 80


def call_of(name: str, text: str) -> list[tuple[str, Any]]:
    parser = make_parser(choose_format("", name, "none"), parse_tools=True, schemas=TOOL)
    pieces = [parser.feed(text), parser.finish()]
    found: dict[int, list[str]] = {}
    for one in (call for piece in pieces for call in piece.tool_calls):
        entry = found.setdefault(one.index, ["", ""])
        entry[0] += one.name
        entry[1] += one.arguments
    return [(called, json.loads(arguments)) for called, arguments in found.values()]


def markers(name: str) -> dict[str, int]:
    kept = choose_format("", name, "none").kept_for(with_tools=True)
    return {one: found[0] for one in kept if len(found := ids_of(one)) == 1}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", [row.name for row in TOOLS])
def test_a_forced_call_is_whole_within_its_limit(name: str) -> None:
    chat = choose_format("", name, "none")
    text = forced_grammar(chat, TOOL, markers(name), max_calls=4, in_reasoning=False, may_think=False)
    for seed in range(2):
        answer, _ = drawn(compiled(lark(text)), 600, seed)
        calls = call_of(name, answer)
        assert calls
        for called, arguments in calls:
            assert called == "write_file"
            jsonschema.validate(arguments, TOOL["write_file"])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "kimi_k2", "harmony", "lfm2"])
def test_a_call_by_choice_is_whole_within_the_limit_of_its_answer(name: str) -> None:
    chat = choose_format("", name, "none")
    grammar = held_grammar(chat, TOOL, ["write_file"], markers(name), max_calls=4)
    begin = "<|start|>assistant" if name == "harmony" else "I will write that file now. "
    answer, state = drawn(held(grammar), 300, 1, begin + grammar.opens[0])
    assert state.is_cut
    ((called, arguments), *_) = call_of(name, answer)
    assert called == "write_file"
    jsonschema.validate(arguments, TOOL["write_file"])


def test_a_thought_is_not_cut_short() -> None:
    chat = choose_format("", "hermes", "think")
    text = forced_grammar(chat, TOOL, markers("hermes"), max_calls=1, in_reasoning=True)
    spec: ConstraintSpec = replace(lark(text), thought=Thought("<think>", ("</think>",), is_open=True))
    grammar: CompiledGrammar = compiled(spec)
    state, free = grammar.start(EOS, 100), grammar.start(EOS)
    for token_id in (ids_of("Let me think about it. ") * 30)[:99]:
        assert allowed(state) == allowed(free)
        assert state.advance(token_id)
        assert free.advance(token_id)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("number", [*range(0, 200, 8), 103, 7])
def test_schemas_of_pydantic_models_end_in_time(number: int) -> None:
    document = model_of(number).model_json_schema()
    grammar = compiled(schema(document), grammar_tokenizer())
    shortest = grammar.start(EOS).copy()
    assert not shortest.is_done
    text, state = drawn(grammar, 400, number)
    assert state.is_done, text[-200:]
    json.loads(text)


@pytest.mark.parametrize("most", range(40, 60, 3))
def test_a_text_that_may_end_at_some_of_its_places_alone_ends_in_time(most: int) -> None:
    # From one character to the next the way to its end grows by several tokens.
    data = {
        "type": "object",
        "properties": {"data": {"type": "string", "format": "base64"}, "note": {"type": "string"}},
        "required": ["data", "note"],
        "additionalProperties": False,
    }
    for seed in range(4):
        text, state = drawn(compiled(schema(data)), most, seed, '{"data": "')
        jsonschema.validate(json.loads(text), data)
        assert state.is_cut


def shortest_of(folder: Path, texts: Iterable[str], document: Any) -> str:
    """Return the short output that is found for a schema, with a vocabulary of bytes and `texts`."""
    made = list(texts)
    save_byte_tokenizer(folder, made)
    tokenizer = GrammarTokenizer(folder, 256 + len(made))
    spec = schema(document)
    assert spec.kind is not None
    text = to_lark(spec.kind, spec.text, spec.choices)
    matcher = new_matcher(tokenizer, text)
    ends = ShortEnds(tokenizer, matcher, text)
    found = ends.find(matcher, 512)
    assert found is not None
    assert ends.shortest == len(found)
    return str(tokenizer.native.decode_str(list(found)))


@pytest.mark.parametrize("texts", [['"",'], [' "",'], [' "', '"",', ' "",', '",', '","', '", "', " [],", "[],"]])
def test_a_token_that_holds_a_comma_adds_no_member(tmp_path: Path, texts: list[str]) -> None:
    document = {
        "x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
        "type": "object",
        "properties": {"keys": {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1}},
        "required": ["keys"],
    }
    text = shortest_of(tmp_path, [*texts, "...", "keys"], document)
    assert len(json.loads(text)["keys"]) == 1
    assert len(text) < 40


def test_a_pattern_of_short_tokens_has_an_end_in_a_large_vocabulary(tmp_path: Path) -> None:
    # One pair of letters among 31 longer words each: the tokens that go furthest are none of the pattern's.
    pairs = ["".join(pair) for pair in itertools.product(string.ascii_uppercase, repeat=2)]
    words = ("".join(word) for word in itertools.permutations("abcdefghij", 6))
    texts = [text for pair in pairs for text in (pair, *itertools.islice(words, 31))]
    document = {
        "type": "object",
        "properties": {"city": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}},
        "required": ["city"],
    }
    jsonschema.validate(json.loads(shortest_of(tmp_path, texts, document)), document)


@pytest.mark.parametrize("name", [row.name for row in TOOLS])
def test_a_call_is_one_call_with_no_more_arguments_than_it_needs(name: str) -> None:
    # What stands between calls stands between members, too.
    tool = {"write_file": {**TOOL["write_file"], "additionalProperties": True}}
    chat = choose_format("", name, "none")
    spec = lark(forced_grammar(chat, tool, markers(name), max_calls=4, in_reasoning=False, may_think=False))
    assert spec.kind is not None
    text = to_lark(spec.kind, spec.text, spec.choices)
    matcher = new_matcher(grammar_tokenizer(), text)
    found = ShortEnds(grammar_tokenizer(), matcher, text).find(matcher, 512)
    assert found is not None
    ((called, arguments),) = call_of(name, grammar_tokenizer().native.decode_str(list(found)))
    assert (called, arguments.keys()) == ("write_file", {"path", "text", "mode"})


def test_a_grammar_without_a_short_end_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    monkeypatch.setattr(ShortEnds, "find", lambda _ends, _matcher, most: searches.append(most))
    # Each search takes too long.
    monkeypatch.setattr(time, "thread_time", itertools.count().__next__)
    text = "start: /[a-z]{600}/"
    assert ShortEnds(grammar_tokenizer(), new_matcher(grammar_tokenizer(), text), text).shortest is None
    assert len(searches) == 1
