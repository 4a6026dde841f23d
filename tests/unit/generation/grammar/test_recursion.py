"""Schemas that refer to themselves have an end: a definition is written within itself up to a depth, and no deeper."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from factories.engine.grammars import accepts, grammar_tokenizer
from factories.wire.pydantic_models import Tree
from penstock.generation.grammar.matching import new_matcher
from penstock.generation.grammar.schemas.recursion import bound_recursion
from penstock.generation.grammar.state import CompiledGrammar
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
BRANCHES = {"$ref": "#/$defs/B", "$defs": {"B": {"type": "object", "additionalProperties": {"$ref": "#/$defs/B"}}}}
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


def test_a_schema_whose_documents_are_deeper_keeps_them() -> None:
    definitions: dict[str, Any] = {"N": {"anyOf": [{"$ref": "#/$defs/N0"}, {"$ref": "#/$defs/N3"}]}, "N3": INTEGER}
    for at in range(3):
        inner = {"type": "array", "items": {"$ref": f"#/$defs/N{at + 1}"}, "minItems": 1, "maxItems": 1}
        definitions[f"N{at}"] = inner
    # What holds itself holds itself at least three times, for a bound of one.
    definitions["N2"]["items"] = {"anyOf": [{"$ref": "#/$defs/N0"}, INTEGER]}
    schema = {"$ref": "#/$defs/N0", "$defs": definitions, "x-guidance": {"max_depth": 1}}
    assert accepts(grammar_of(schema), "[[[1]]]")
    assert accepts(grammar_of(schema), "[[[[[[1]]]]]]")


def test_what_does_not_refer_to_itself_is_as_it_was() -> None:
    schema = {"$ref": "#/$defs/0", "$defs": {"0": {"items": {"$ref": "#/$defs/1"}}, "1": INTEGER}}
    assert bound_recursion(schema, 8) is schema


def test_a_large_group_keeps_no_bound_and_a_long_chain_is_no_group() -> None:
    def ring(length: int) -> dict[str, Any]:
        return {f"{at}": {"items": {"$ref": f"#/$defs/{(at + 1) % length}"}} for at in range(length)}

    large = {"$ref": "#/$defs/0", "$defs": ring(600)}
    assert bound_recursion(large, 8) is large
    assert len(bound_recursion({"$ref": "#/$defs/0", "$defs": ring(50)}, 8)["$defs"]) == 450
    chain = {"$ref": "#/$defs/0", "$defs": {**ring(5000), "4999": INTEGER}}
    assert bound_recursion(chain, 8) is chain
