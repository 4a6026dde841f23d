"""Schemas that refer to themselves have an end: a definition is written within itself up to a depth, and no deeper."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from factories.engine.grammars import accepts, grammar_tokenizer
from factories.wire.pydantic_models import Tree
from penstock.generation.grammar.matcher_state import CompiledGrammar
from penstock.generation.grammar.matching import new_matcher
from penstock.generation.grammar.schemas.recursion import bound_recursion
from penstock.generation.grammar.trial_process import answer_to

INTEGER, NULL = {"type": "integer"}, {"type": "null"}
TREE = Tree.model_json_schema()
LIST = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#"}, NULL]}},
    "required": ["next"],
}
# Two definitions that take turns; at the last depth a sum is none, since its sides would be too deep.
SUM = {"type": "object", "properties": {"l": {"$ref": "#/$defs/E"}, "r": INTEGER}, "required": ["l", "r"]}
TERM = {"$ref": "#/$defs/E", "$defs": {"E": {"anyOf": [{"$ref": "#/$defs/S"}, INTEGER]}, "S": SUM}}
BRANCHES: dict[str, Any] = {
    "$ref": "#/$defs/B",
    "$defs": {"B": {"type": "object", "additionalProperties": {"$ref": "#/$defs/B"}}},
}
PAIR = {"type": "array", "prefixItems": [{"$ref": "#/$defs/P"}], "items": False}
PAIRS = {"$ref": "#/$defs/P", "$defs": {"P": PAIR}}
# Schema, a document of it, and one around another.
NESTED: dict[str, tuple[dict[str, Any], Any, Callable[[Any], Any]]] = {
    "a list of itself": (TREE, {"value": 1, "children": []}, lambda one: {"value": 1, "children": [one]}),
    "itself or null": (LIST, {"next": None}, lambda one: {"next": one}),
    "two in turn": (TERM, 1, lambda one: {"l": one, "r": 1}),
    "keys of any name": (BRANCHES, {}, lambda one: {"a": one}),
    "first items": (PAIRS, [], lambda one: [one]),
}


def grammar_of(schema: dict[str, Any]) -> CompiledGrammar:
    asked = {"kind": "json_schema", "text": json.dumps(schema), "choices": ()}
    answer = answer_to(grammar_tokenizer(), asked, 10.0)
    assert "lark" in answer, answer
    return CompiledGrammar(new_matcher(grammar_tokenizer(), answer["lark"]), grammar_tokenizer(), "constraint")


def nested(times: int, name: str) -> str:
    _, made, around = NESTED[name]
    for _ in range(times):
        made = around(made)
    return json.dumps(made)


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("depth", [8, 2])
def test_a_definition_is_within_itself_up_to_the_depth(name: str, depth: int) -> None:
    schema = NESTED[name][0]
    grammar = grammar_of(schema if depth == 8 else {**schema, "x-guidance": {"max_depth": depth}})
    # A reference to the whole schema is not the whole schema: that is one level more.
    most = depth + ("#" in str(schema) and schema is LIST)
    assert all(accepts(grammar, nested(times, name)) for times in range(most + 1))
    assert not accepts(grammar, nested(most + 1, name))


@pytest.mark.parametrize("name", NESTED)
def test_without_a_bound_it_is_there_as_often_as_a_model_writes(name: str) -> None:
    grammar = grammar_of({**NESTED[name][0], "x-guidance": {"max_depth": 0}})
    assert accepts(grammar, nested(30, name))


def circle(length: int, **more: Any) -> dict[str, Any]:
    """Make definitions of objects of which each holds the next, and the last one the first."""
    return {
        f"{at}": {
            "type": "object",
            "properties": {f"k{(at + 1) % length}": {"$ref": f"#/$defs/{(at + 1) % length}"}, **more},
        }
        for at in range(length)
    }


def around_the_circle(length: int, steps: int) -> str:
    document: dict[str, Any] = {}
    for at in range(steps, 0, -1):
        document = {f"k{at % length}": document}
    return json.dumps(document)


@pytest.mark.parametrize(("length", "depth"), [(3, 2), (3, 8), (9, 8), (9, 1), (2, 3)])
def test_definitions_in_a_circle_are_each_within_itself_up_to_the_depth(length: int, depth: int) -> None:
    grammar = grammar_of({"$ref": "#/$defs/0", "$defs": circle(length), "x-guidance": {"max_depth": depth}})
    most = length * (depth + 1) - 1
    assert [steps for steps in range(most + 1) if not accepts(grammar, around_the_circle(length, steps))] == []
    assert not accepts(grammar, around_the_circle(length, most + 1))


def test_circles_that_share_a_definition_are_counted_by_it() -> None:
    kinds = {f"K{at}": {"type": "object", "properties": {f"k{at}": {"$ref": "#/$defs/E"}}} for at in range(12)}
    either = {"E": {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in kinds]}}
    grammar = grammar_of({"$ref": "#/$defs/E", "$defs": {**kinds, **either}})
    document: dict[str, Any] = {}
    for at in range(8):
        document = {f"k{at}": document}
    assert accepts(grammar, json.dumps(document))
    assert not accepts(grammar, json.dumps({"k8": {"k9": document}}))


def test_schemas_beside_one_whose_documents_are_deeper_keep_their_bound() -> None:
    """Of a chain that is asked for backwards, the last one holds all others: no bound of one is enough for it."""
    chain: dict[str, Any] = {}
    for at in range(4):
        steps = {f"n{at + 1}": {"$ref": f"#/$defs/C{at + 1}"}} if at < 3 else {}
        back = {f"p{at - 1}": {"$ref": f"#/$defs/C{at - 1}"}} if at else {}
        chain[f"C{at}"] = {"type": "object", "properties": {**steps, **back}, "required": [*back]}
    schema = {
        "type": "object",
        "properties": {"deep": {"$ref": "#/$defs/C0"}, "tree": {"$ref": "#/$defs/B"}},
        "$defs": {**chain, **BRANCHES["$defs"]},
        "x-guidance": {"max_depth": 1},
    }
    grammar = grammar_of(schema)
    least: dict[str, Any] = {"p2": {"p1": {"p0": {}}}}
    assert accepts(grammar, json.dumps({"deep": {"n1": {"n2": {"n3": least, "p1": {"p0": {}}}, "p0": {}}}}))
    assert accepts(grammar, json.dumps({"tree": {"a": {}}}))
    assert not accepts(grammar, json.dumps({"tree": {"a": {"a": {}}}}))


def test_what_does_not_refer_to_itself_is_as_it_was() -> None:
    schema = {"$ref": "#/$defs/0", "$defs": {"0": {"items": {"$ref": "#/$defs/1"}}, "1": INTEGER}}
    assert bound_recursion(schema, 8) is schema


def names_of(schema: dict[str, Any]) -> set[str]:
    return {*schema["$defs"]}


def test_a_large_group_keeps_no_bound_and_a_long_chain_is_no_group() -> None:
    large = {"$ref": "#/$defs/0", "$defs": circle(600)}
    assert bound_recursion(large, 8) is large
    assert len(bound_recursion({"$ref": "#/$defs/0", "$defs": circle(50)}, 8)["$defs"]) == 450
    chain = {"$ref": "#/$defs/0", "$defs": {**circle(5000), "4999": INTEGER}}
    assert bound_recursion(chain, 8) is chain


def of_itself(properties: int, name: str) -> dict[str, Any]:
    """Make an object of integers that holds itself."""
    own = {"me": {"$ref": f"#/$defs/{name}"}}
    return {"type": "object", "properties": {**{f"property_{at}": INTEGER for at in range(properties)}, **own}}


def test_the_copies_of_all_definitions_have_a_bound_and_the_smallest_come_first() -> None:
    definitions = {f"{at}": of_itself(1, f"{at}") for at in range(100)}
    many = {"$ref": "#/$defs/0", "$defs": definitions}
    made = names_of(bound_recursion(many, 8))
    assert len({name for name in made if "-" in name}) == 56 * 9
    assert len({name for name in made if "-" not in name}) == 44
    large = {f"large {at}": of_itself(200 + at, f"large {at}") for at in range(3)}
    made = names_of(bound_recursion({"$ref": "#/$defs/0", "$defs": {**large, "0": of_itself(1, "0")}}, 8))
    assert {"0-8", "large 0-8", "large 1-8", "large 2"} <= made


@pytest.mark.parametrize(
    ("number", "properties", "depth"), [(170, 10, 8), (1, 60, 500), (1, 60, 600), (60, 10, 8), (1, 450, 8), (1, 600, 8)]
)
def test_a_schema_that_compiles_does_so_with_its_bounds(number: int, properties: int, depth: int) -> None:
    definitions = {f"D{at}": of_itself(properties - 1, f"D{at}") for at in range(number)}
    first = {f"r{at}": {"$ref": f"#/$defs/D{at}"} for at in range(number)}
    schema = {"type": "object", "properties": first, "$defs": definitions, "x-guidance": {"max_depth": depth}}
    assert accepts(grammar_of(schema), '{"r0": {"property_0": 1, "me": {}}}')
