"""An object in which a key came twice holds nothing more, and a long key ends: a model that repeats itself ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from factories.engine.grammars import EOS, accepts, allowed, compiled, compiled_around, ids_of, schema, text_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from penstock.generation.grammar.matcher_state import MatcherState
from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec
from penstock.generation.grammar.written_keys import KeyTokens, WrittenKeys
from penstock.text.thoughts import Thought
from penstock.text.token_bytes import TokenBytes

NUMBERS = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}}
(COMMA,), (CLOSE,) = ids_of(","), ids_of("}")


def after(text: str, spec: ConstraintSpec, around: str = "") -> MatcherState:
    state = (compiled_around(spec, around) if around else compiled(spec)).start(EOS)
    for token_id in ids_of(text):
        assert state.advance(token_id)
    return state


@pytest.mark.parametrize(
    ("text", "goes_on"),
    [
        ('{"a":1', True),
        ('{"a":1,"b":1', True),
        ('{"a":1,"a":1', False),
        ('{"a":1,"b":1,"a":1', False),
        # Only as far as the text goes: another key, and one that is not over.
        ('{"a":1,"a ":1', True),
        ('{"a":"a","b":"a"', True),
    ],
)
def test_behind_a_key_that_came_twice_only_the_end_of_its_object_follows(text: str, goes_on: bool) -> None:
    found = allowed(after(text, ConstraintSpec(ConstraintKind.JSON_OBJECT)))
    assert CLOSE in found
    assert (COMMA in found) is goes_on


def test_the_objects_around_it_go_on() -> None:
    state = after('{"x":{"a":1,"a":1', ConstraintSpec(ConstraintKind.JSON_OBJECT))
    assert COMMA not in allowed(state)
    assert state.advance(CLOSE)
    assert COMMA in allowed(state)
    for token_id in ids_of(',"x":[{"a":1},{"a":1}'):
        assert state.advance(token_id)
    # The array goes on; the outer object ends behind it.
    assert COMMA in allowed(state)
    assert state.advance(ids_of("]")[0])
    assert COMMA not in allowed(state)


def test_where_the_schema_asks_for_more_keys_it_wins() -> None:
    """As llguidance counts them, which a caller may ask for: equal keys count, too."""
    state = after('{"a":1,"a":1', schema({"x-guidance": {"lenient": True}, **NUMBERS, "minProperties": 3}))
    assert COMMA in allowed(state)
    assert CLOSE not in allowed(state)


def test_calls_in_place_of_the_object_have_no_keys() -> None:
    around = "start: @answer | /<f:[^<]*</"
    spec = ConstraintSpec(ConstraintKind.JSON_OBJECT, may_be_calls=True)
    assert COMMA not in allowed(after('{"a":1,"a":1', spec, around))
    assert COMMA in allowed(after('<f:{"a":1,"a":1', spec, around))
    assert COMMA in allowed(after('<f:{"a":1,"a":1', spec, around).copy())


def test_objects_of_an_array_in_place_of_calls_have_keys() -> None:
    around = "start: @answer | /<f:[^<]*</"
    spec = schema({"type": "array", "items": {"type": "object"}})
    beside = replace(spec, may_be_calls=True)
    assert COMMA not in allowed(after('[{"a":1,"a":1', beside, around))
    assert COMMA in allowed(after('[{"a":1,"b":1', beside, around))


def test_a_closed_object_is_as_it_was() -> None:
    closed = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"], "additionalProperties": False}
    assert COMMA in allowed(after('{"a":{"x":1,"x":2}', schema(closed)))


def test_it_comes_after_a_thought() -> None:
    thought = Thought("BEGIN", ("END",), is_open=True)
    text = 'perhaps {"a":1,"a":1,END{"a":1,"a":1'
    around = 'start: /[^E]*/ "END" @answer\n'
    assert COMMA not in allowed(after(text, ConstraintSpec(ConstraintKind.JSON_OBJECT, thought=thought), around))
    # Nobody knows where the answer begins.
    assert COMMA in allowed(after(text, ConstraintSpec(ConstraintKind.JSON_OBJECT), around))


NAMED = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}


@pytest.mark.parametrize(
    ("begin", "document"),
    [
        ('{"', {"type": "object"}),
        ('{"x":[{"', {"type": "object"}),
        # llguidance itself bounds no keys beside named ones.
        ('{"title":"x","', {**NAMED, "additionalProperties": {"type": "integer"}}),
    ],
)
@pytest.mark.parametrize(("own", "most"), [({}, 128), ({"max_key_characters": 9}, 9), ({"max_characters": 5}, 5)])
def test_a_key_that_runs_on_ends(begin: str, document: dict[str, Any], own: dict[str, int], most: int) -> None:
    state = after(begin + "é" * (most - 1), schema({"x-guidance": own, **document}))
    for token_id in ids_of("é"):
        assert token_id in allowed(state)
        assert state.advance(token_id)
    texts = {text_tokenizer().decode([token_id]) for token_id in allowed(state)}
    assert texts
    assert all(text.startswith('"') for text in texts)


def test_a_long_key_of_the_schema_is_written_whole() -> None:
    name = "a long name " * 20
    one = schema({"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]})
    assert accepts(compiled(one), json.dumps({name: 1}))
    state = compiled(one).start(EOS)
    for token_id in ids_of(json.dumps({name: 1})):
        assert token_id in allowed(state)
        assert state.advance(token_id)


@pytest.mark.parametrize("named", [{"required": True}, {"properties": True}])
def test_a_long_key_of_the_schema_is_written_whole_where_others_may_come(named: dict[str, bool]) -> None:
    name = "a long name " * 20
    document: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "integer"}}
    if "properties" in named:
        document["properties"] = {name: {"type": "integer"}}
    else:
        document["required"] = [name]
    grammar = compiled(schema(document))
    assert accepts(grammar, json.dumps({name: 1}))
    state = grammar.start(EOS)
    for token_id in ids_of(json.dumps({name: 1})):
        assert token_id in allowed(state)
        assert state.advance(token_id)


def test_no_bound_is_none() -> None:
    state = after('{"' + "k" * 400, schema({"x-guidance": {"max_key_characters": 0}, "type": "object"}))
    assert ids_of("k")[0] in allowed(state)


def reference(text: str) -> int:
    """Number of objects of a JSON text in which a key comes twice."""
    found = 0

    def pairs(members: list[tuple[str, Any]]) -> Any:
        nonlocal found
        found += len({key for key, _ in members}) < len(members)
        return members

    json.loads(text, object_pairs_hook=pairs)
    return found


def written_of(value: Any, doubled: Callable[[], bool]) -> str:
    if isinstance(value, dict):
        members = [f"{json.dumps(key)}:{written_of(one, doubled)}" for key, one in value.items()]
        return "{" + ",".join([*members, *(members[:1] if doubled() else [])]) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written_of(one, doubled) for one in value) + "]"
    return json.dumps(value)


@given(
    st.recursive(
        st.text('ab"\\{}[],:é', max_size=4) | st.integers() | st.none(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\{,:é', max_size=3), inner, max_size=3)
        ),
    ),
    st.data(),
)
def test_any_split_of_any_text_is_read_alike(value: Any, data: st.DataObject) -> None:
    text = written_of(value, lambda: data.draw(st.booleans()))
    size = data.draw(st.integers(1, 7))
    encoded = text.encode()
    whole, split, most = WrittenKeys(), WrittenKeys(), 0
    seen = []
    for at in range(0, len(encoded), size):
        seen.append(split.copy().feed(encoded[at : at + size]))
        assert split.feed(encoded[at : at + size]) is seen[-1]
        most = max(most, split.num_repeated)
    assert whole.feed(encoded) is all(seen)
    assert whole.num_repeated == split.num_repeated == 0
    if size == 1:
        # Nested ones are open at the same time.
        assert bool(most) is bool(reference(text))


def test_tokens_with_a_byte_are_found() -> None:
    table = TokenBytes({0: b"a,", 1: b"", 2: b",,", 4: b"b", 5: b",", 7: b""}, special=())
    assert table.ids_with(ord(",")).tolist() == [0, 2, 5]


@pytest.mark.parametrize(
    "text", [b'{"a":1,"a":1', b'{"a":1,"a":"', b'{"a":1,"a":"x', b'{"a":1,"a":"\\', b'{"a":1,"a":[1']
)
def test_every_token_that_goes_on_is_forbidden_and_no_other(text: bytes) -> None:
    """Within a text only tokens with a comma behind a quote are looked at."""
    tokens = [
        b"",
        b"x",
        b",",
        b"a,",
        b'"',
        b'",',
        b'", "b',
        b'"}',
        b'"},',
        b'\\",',
        b'\\","',
        b",,",
        b"]",
        b"],",
        b"},1",
        b'",a,',
    ]
    table = TokenBytes(dict(enumerate(tokens)), special=())
    written = WrittenKeys()
    written.feed(text)
    row_W = np.full(1, 0xFFFFFFFF, dtype=np.uint32)
    KeyTokens(table, len(tokens)).restrict(row_W, written)
    left = [token for number, token in enumerate(tokens) if int(row_W[0]) >> number & 1]
    assert left == [token for token in tokens if written.copy().feed(token)]
    assert left != tokens
