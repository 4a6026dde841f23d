"""Schemas as callers write them: what says nothing, what other words tell, what is refused, and what ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from factories.engine.grammars import accepts, grammar_tokenizer
from penstock.generation.grammar.grammar_limits import JsonBounds
from penstock.generation.grammar.matcher_state import CompiledGrammar
from penstock.generation.grammar.matching import new_matcher
from penstock.generation.grammar.spec import ConstraintKind
from penstock.generation.grammar.translate import to_lark
from penstock.generation.grammar.trial_process import answer_to
from penstock.router.chat.forced_calls import forced_grammar
from penstock.router.chat.formats import choose_format

OBJECT: dict[str, Any] = {"type": "object"}
INTEGER = {"type": "integer"}
# Words that say nothing where they stand, with a document of each.
SILENT: list[tuple[dict[str, Any], str]] = [
    ({**OBJECT, "properties": {"a": INTEGER}, "propertyNames": {"type": "string"}}, '{"a": 1}'),
    ({**OBJECT, "properties": {"a": INTEGER}, "propertyNames": {}}, '{"a": 1}'),
    ({**OBJECT, "properties": {"a": INTEGER}, "propertyNames": True}, '{"a": 1}'),
    ({"type": "string", "propertyNames": {"maxLength": 3}}, '"long text"'),
    ({"type": "array", "items": INTEGER, "uniqueItems": False}, "[1, 1]"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True, "maxItems": 1}, "[1]"),
    ({"type": "string", "uniqueItems": True}, '"a"'),
    ({**INTEGER, "minContains": 1, "maxContains": 2, "contains": {"const": 1}}, "7"),
    ({"type": "array", "items": INTEGER, "minContains": 2}, "[1]"),
    ({"type": "array", "items": INTEGER, "maxContains": 2}, "[1, 2, 3]"),
    ({"type": "array", "items": INTEGER, "contains": {"const": 5}, "minContains": 0}, "[1]"),
    ({**INTEGER, "not": False}, "1"),
    ({**INTEGER, "not": {"type": "null"}}, "1"),
    ({**INTEGER, "if": {"minimum": 3}}, "1"),
    ({**INTEGER, "then": {"minimum": 3}}, "1"),
    ({**INTEGER, "else": {"minimum": 3}}, "1"),
    ({**INTEGER, "if": {"minimum": 3}, "then": {}, "else": True}, "1"),
    ({**INTEGER, "if": {"minimum": 3}, "then": {"title": "t"}}, "1"),
    ({**OBJECT, "properties": {"a": INTEGER}, "dependentRequired": {}}, '{"a": 1}'),
    ({**OBJECT, "properties": {"a": INTEGER}, "dependentRequired": {"a": []}}, '{"a": 1}'),
    ({**OBJECT, "properties": {"a": INTEGER}, "dependentSchemas": {"a": True}}, '{"a": 1}'),
    ({**OBJECT, "properties": {"a": INTEGER}, "dependencies": {"a": []}}, '{"a": 1}'),
    ({**OBJECT, "properties": {"a": INTEGER}, "unevaluatedProperties": True}, '{"a": 1}'),
    ({"type": "array", "items": INTEGER, "unevaluatedItems": {}}, "[1]"),
    ({**OBJECT, "properties": {"a": INTEGER}, "minProperties": 0}, '{"a": 1}'),
    ({**OBJECT, "properties": {"a": INTEGER}, "maxProperties": 9, "additionalProperties": False}, '{"a": 1}'),
    ({**INTEGER, "$dynamicAnchor": "here"}, "1"),
    ({**INTEGER, "$recursiveAnchor": True}, "1"),
    ({**INTEGER, "nullable": True, "example": 1, "deprecated": True, "discriminator": {"propertyName": "k"}}, "1"),
    ({"format": "int64"}, "1"),
]
# Formats that only annotate: of pydantic, OpenAPI, the standard, and of nobody.
ANNOTATIONS = (
    *(
        "path",
        "file-path",
        "directory-path",
        "password",
        "binary",
        "json-string",
        "multi-host-uri",
        "color",
        "name-email",
    ),
    *("int32", "int64", "float", "double", "decimal", "html", "markdown", "phone", "nobody-knows", ""),
    *("regex", "uri-reference", "uri-template", "iri", "iri-reference", "json-pointer", "relative-json-pointer"),
    *("idn-email", "idn-hostname"),
)
OPTIONAL_TWO = {**OBJECT, "properties": {"a": INTEGER, "b": INTEGER}}
ANY_KEYS = {**OBJECT, "additionalProperties": INTEGER}
PETS = {
    "$defs": {
        "Cat": {**OBJECT, "properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind"]},
        "Dog": {
            **OBJECT,
            "properties": {"kind": {"const": "dog"}, "of": {"$ref": "#/$defs/Cat"}},
            "required": ["kind"],
        },
    },
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
}
JOINED = {
    "$defs": {"Base": {**OBJECT, "properties": {"id": INTEGER}, "required": ["id"]}},
    "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"x": INTEGER}}],
}
# Schema -> documents that may be written, and that may not.
TOLD: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # Names of keys.
    ({**ANY_KEYS, "propertyNames": {"enum": ["a", "b"]}}, ["{}", '{"b": 1}'], ['{"c": 1}', '{"a": 1, "a": 2}']),
    ({**ANY_KEYS, "propertyNames": {"const": "a"}}, ['{"a": 1}'], ['{"b": 1}']),
    ({**ANY_KEYS, "propertyNames": {"$ref": "#/$defs/N"}, "$defs": {"N": {"enum": ["a"]}}}, ['{"a": 1}'], ['{"b": 1}']),
    ({**ANY_KEYS, "propertyNames": {"pattern": "^x"}}, ['{"xa": 1}'], ['{"ax": 1}']),
    ({**ANY_KEYS, "propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"ab": 1}'], ['{"a": 1}', '{"abcd": 1}']),
    ({**ANY_KEYS, "propertyNames": {"format": "date"}}, ['{"2024-02-29": 1}'], ['{"2023-02-29": 1}', '{"x": 1}']),
    # Equal items.
    ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}}, ["[]", '["a", "b"]'], ['["a", "a"]']),
    (
        {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "minItems": 2},
        ["[false, true]"],
        ["[true]"],
    ),
    # Counts of keys: of different ones.
    ({**OPTIONAL_TWO, "minProperties": 1}, ['{"a": 1}', '{"b": 1}'], ["{}"]),
    ({**OPTIONAL_TWO, "minProperties": 2}, ['{"a": 1, "b": 1}'], ['{"a": 1}', '{"a": 1, "a": 2}']),
    ({**OPTIONAL_TWO, "maxProperties": 1}, ["{}", '{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}']),
    ({**ANY_KEYS, "minProperties": 1}, ['{"z": 1}'], ["{}"]),
    (
        {**ANY_KEYS, "propertyNames": {"enum": ["a", "b"]}, "minProperties": 2},
        ['{"a": 1, "b": 1}'],
        ['{"a": 1, "a": 1}'],
    ),
    (
        {**ANY_KEYS, "properties": {"a": INTEGER}, "minProperties": 2},
        ['{"a": 1, "c": 1}'],
        ['{"a": 1}', '{"c": 1, "c": 1}'],
    ),
    # What a key asks for.
    ({**OPTIONAL_TWO, "dependentRequired": {"a": ["b"]}}, ["{}", '{"b": 1}', '{"a": 1, "b": 1}'], ['{"a": 1}']),
    ({**OPTIONAL_TWO, "dependencies": {"a": {"required": ["b"]}}}, ['{"b": 1}'], ['{"a": 1}']),
    ({"type": "array", "items": INTEGER, "contains": True, "minContains": 2}, ["[1, 2]"], ["[1]"]),
    ({**INTEGER, "if": True, "then": {"minimum": 3}, "else": False}, ["3"], ["2"]),
    ({"type": ["string", "null"], "not": {"type": "null"}}, ['"a"'], ["null"]),
    # Multiples are multiples in binary, too.
    (
        {"type": "number", "multipleOf": 0.1},
        ["0.5", "1", "-2.5", "1.1", "-1.1", "123456.5"],
        ["1.2", "0.3", "0.7", "0.55"],
    ),
    ({"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 2}, ["0.1", "1.1", "2"], ["1.2", "0.3", "2.1"]),
    ({"type": ["number", "null"], "multipleOf": 0.01}, ["null", "0.25", "19.98", "3"], ["0.29", "19.99", '"a"']),
    ({"type": "number", "multipleOf": 0.25}, ["1.25", "0.50"], ["0.1"]),
    ({**INTEGER, "multipleOf": 2.5}, ["5", "10"], ["2", "7"]),
    # Dates and times that there are.
    ({"type": "string", "format": "date"}, ['"0001-01-01"', '"2024-02-29"', '"2000-02-29"'], ['"0000-01-01"']),
    ({"type": "string", "format": "date"}, ['"2023-02-28"'], ['"2023-02-29"', '"1900-02-29"', '"2023-04-31"']),
    ({"type": "string", "format": "date-time"}, ['"2024-01-01T23:59:59Z"'], ['"0000-01-01T00:00:00Z"']),
    ({"type": "string", "format": "date-time"}, ['"2024-02-29T00:00:00.5+01:00"'], ['"2023-02-29T00:00:00Z"']),
    ({"type": "string", "format": "time"}, ['"23:59:59Z"'], ['"12:00:60Z"', '"23:59:60Z"']),
    (
        {"type": "string", "format": "uuid4"},
        ['"123e4567-e89b-42d3-a456-426614174000"'],
        ['"123e4567-e89b-12d3-a456-426614174000"'],
    ),
    # Objects have the keys that their schemas name.
    (OPTIONAL_TWO, ["{}", '{"a": 1}', '{"a": 1, "b": 2}'], ['{"a": 1, "c": 2}']),
    ({**OBJECT, "required": ["a"]}, ['{"a": null}'], ['{"a": 1, "c": 2}', "{}"]),
    ({**OPTIONAL_TWO, "additionalProperties": INTEGER}, ['{"a": 1, "c": 1}', '{"c": 1}'], ['{"c": ""}']),
    (PETS, ['{"kind": "cat", "lives": 9}', '{"kind": "dog", "of": {"kind": "cat"}}'], ['{"kind": "cat", "of": 1}']),
    (PETS, ['{"kind": "dog"}'], ['{"kind": "dog", "name": "x"}', '{"kind": "dog", "of": {"kind": "cat", "z": 1}}']),
    (JOINED, ['{"id": 1}', '{"id": 1, "x": 2}'], ['{"id": 1, "y": 2}', '{"x": 1}']),
    (
        {"$ref": "#/$defs/T", "$defs": {"T": {**OBJECT, "properties": {"t": {"$ref": "#/$defs/T"}}}}},
        ['{"t": {}}'],
        ['{"t": {"u": 1}}'],
    ),
    # A reference by another name of the document.
    (
        {"$id": "urn:x", **OBJECT, "properties": {"a": {"$ref": "urn:x#/$defs/I"}}, "$defs": {"I": INTEGER}},
        ['{"a": 1}'],
        ['{"a": ""}'],
    ),
    # White space: none before a comma or a colon, a blank or a line break behind one.
    (
        OPTIONAL_TWO,
        ['{"a":1,"b":2}', '{"a": 1,\n  "b":2}'],
        ['{"a" :1}', '{"a":1 ,"b":2}', '{"a":  1}', '{ "a":1}', '{"a":1,\n\n"b":2}'],
    ),
    ({**OPTIONAL_TWO, "x-guidance": {"compact": True}}, ['{"a":1,"b":2}'], ['{"a": 1}', '{"a":1, "b":2}']),
    ({**OPTIONAL_TWO, "x-guidance": {"whitespace_pattern": " +"}}, ['{ "a" :  1 }'], ['{\n"a":1}']),
    # Closed by strict, also without any name.
    ({**OBJECT, "x-guidance": {"strict": True}}, ["{}"], ['{"a": 1}']),
    (OBJECT, ["{}", '{"a": [1, {"b": null}]}'], ["1"]),
    # Open ends.
    (INTEGER, ["1234567890123456789", "-1"], ["1" + "0" * 19]),
    ({"type": "number"}, ["0.000000001", "-3.5"], ["0." + "3" * 10, "1" + "0" * 15]),
    ({"type": "number", "minimum": 0, "maximum": 1}, ["0.5"], ["0." + "3" * 10]),
    ({**ANY_KEYS, "x-guidance": {"max_keys": 1}}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
    ({"type": "string", "x-guidance": {"max_characters": 2}}, ['"ab"'], ['"abc"']),
    ({"type": "array", "items": INTEGER, "x-guidance": {"max_items": 1}}, ["[1]"], ["[1, 2]"]),
    ({"x-guidance": {"max_depth": 1}}, ["[1]"], ["[[1]]"]),
    ({**INTEGER, "x-guidance": {"max_digits": 2}}, ["-99"], ["100"]),
    ({**INTEGER, "x-guidance": {"max_digits": 0}}, ["1" + "0" * 30], []),
]
# What matters and cannot be held to: schema -> what the message says.
REFUSED: list[tuple[Any, str]] = [
    ({"not": {"required": ["x"]}}, "at {}: `not` is not supported, and cannot be left out"),
    ({"if": {"minimum": 1}, "then": {"maximum": 5}}, "at {}: `if` is not supported"),
    ({"type": "array", "contains": {"const": 1}}, "at {}: `contains` is not supported"),
    ({"type": "array", "uniqueItems": True}, "at {}: `uniqueItems` is not supported but for items of an enum"),
    ({**ANY_KEYS, "minProperties": 2}, "at {}: `minProperties` is not supported above 1 here: a key that"),
    ({**OPTIONAL_TWO, "minProperties": 3}, "at {}: `minProperties` allows no object"),
    ({**ANY_KEYS, "propertyNames": {"not": {}}}, "at {}: `propertyNames` is supported for one of enum"),
    ({"type": "string", "pattern": "(?=a)b"}, "at {}: `pattern` invalid regex: look-around"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "at {}: `oneOf` is supported where no value can satisfy two"),
    ({"type": "any"}, "at {}: `type` must be one of array, boolean"),
    ({"type": "string", "minLength": "3"}, "at {}: `minLength` must be a whole number of 0 or more"),
    ({**OBJECT, "required": True}, "at {}: `required` must be a list of names"),
    ({"$ref": "#/$defs/nothing"}, "at {}: `$ref` refers to nothing"),
    ({"$ref": "https://example.com/a.json"}, "at {}: `$ref` is supported within this schema only"),
    ({"dependentSchemas": {"k": {"contains": {"const": 1}}}}, "at {}/dependentSchemas/k: `contains` is not supported"),
    ({"patternProperties": {"a": INTEGER, "b": INTEGER}}, "at {}: `patternProperties` has patterns that may match"),
]


def compiled(document: Any) -> CompiledGrammar:
    tokenizer = grammar_tokenizer()
    answer = answer_to(tokenizer, {"kind": "json_schema", "text": json.dumps(document), "choices": ()}, 10.0)
    assert "lark" in answer, answer
    return CompiledGrammar(new_matcher(tokenizer, answer["lark"]), tokenizer, "constraint.json_schema")


def refusal(kind: str, text: str) -> str:
    answer = answer_to(grammar_tokenizer(), {"kind": kind, "text": text, "choices": ()}, 10.0)
    assert "refused" in answer, answer
    return answer["refused"]


@pytest.mark.parametrize(("document", "text"), SILENT, ids=[json.dumps(one)[:60] for one, _ in SILENT])
def test_what_says_nothing_is_no_error(document: dict[str, Any], text: str) -> None:
    assert accepts(compiled(document), text)


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_a_format_that_annotates_allows_any_text(name: str) -> None:
    for document in ({"type": "string", "format": name}, {"type": ["string", "null"], "format": name}):
        assert accepts(compiled(document), '"any / text"')


@pytest.mark.parametrize(("document", "right", "wrong"), TOLD, ids=[json.dumps(one)[:60] for one, _, _ in TOLD])
def test_a_schema_allows_what_it_says_and_ends(document: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammar = compiled(document)
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize(("document", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_refusal_names_place_and_keyword(document: Any, message: str) -> None:
    for path, whole in (
        ("#/properties/person/items", {**OBJECT, "properties": {"person": {"type": "array", "items": document}}}),
        ("#/$defs/Person~1One", {"$ref": "#/$defs/Person~1One", "$defs": {"Person/One": document}}),
    ):
        assert refusal("json_schema", json.dumps(whole)).startswith(message.format(path))


def test_a_refusal_without_a_keyword_or_by_llguidance_alone_has_a_place() -> None:
    said = refusal("json_schema", json.dumps({"properties": {"a": 3}}))
    assert said == "at #/properties/a: must be an object, or true or false"
    said = refusal(
        "json_schema",
        json.dumps({**OBJECT, "required": ["a"], "properties": {"a": {**INTEGER, "minimum": 3, "maximum": 2}}}),
    )
    assert said.startswith("at #/properties/a: `minimum` ")


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen3_coder", "glm4", "deepseek_v32"])
def test_a_refusal_names_the_tool(name: str) -> None:
    chat = choose_format("", name, "none")
    bad = {"properties": {"age": {"type": "object", "properties": {"x": {"not": {"const": 1}}}}}}
    text = forced_grammar(chat, {"fine": {}, "get_weather": bad}, {}, max_calls=1, in_reasoning=False)
    said = refusal("grammar", text)
    assert said.startswith("tool get_weather, ")
    assert "properties/x: `not` is not supported" in said
    assert ("parameter age, at #/" in said) or ("at #/properties/age/" in said)


@pytest.mark.parametrize(
    ("schema", "bounds"),
    [({"maxLength": 3}, JsonBounds()), ({}, JsonBounds(max_json_characters=3))],
    ids=["the schema's", "the server's"],
)
def test_a_text_of_a_forced_call_ends_at_its_bound(schema: dict[str, Any], bounds: JsonBounds) -> None:
    """A small model repeats a piece of a text without a bound to its last token."""
    tool = {"properties": {"name": {"type": "string", **schema}}, "required": ["name"]}
    text = forced_grammar(choose_format("", "llama3", "none"), {"say": tool}, {}, max_calls=1, in_reasoning=False)
    tokenizer = grammar_tokenizer()
    matcher = new_matcher(tokenizer, to_lark(ConstraintKind.GRAMMAR, text, (), bounds))
    grammar = CompiledGrammar(matcher, tokenizer, "constraint")
    call = '{"name": "say", "parameters": {"name": "%s"}}'
    assert accepts(grammar, call % "aaa")
    assert not accepts(grammar, call % "aaaa")


def test_values_are_not_repeated() -> None:
    said = refusal("json_schema", json.dumps({"properties": {"a": {"enum": ["s3cret"], "not": {"const": "s3cret"}}}}))
    assert "s3cret" not in said


def test_lenient_leaves_out_what_cannot_be_held_to() -> None:
    document = {"type": "array", "items": INTEGER, "uniqueItems": True}
    assert refusal("json_schema", json.dumps(document)).startswith("at #: `uniqueItems` ")
    assert accepts(compiled({**document, "x-guidance": {"lenient": True}}), "[1, 1]")


def test_an_unused_definition_does_not_matter() -> None:
    assert accepts(compiled({**INTEGER, "$defs": {"unused": {"not": {"const": 1}}}}), "1")


def test_a_long_path_and_odd_names_leave_a_short_line() -> None:
    document: Any = {"not": {"const": 1}}
    for _ in range(40):
        document = {**OBJECT, "properties": {"long\nname\x00": document}}
    said = refusal("json_schema", json.dumps(document))
    assert said.isprintable()
    assert len(said) < 300
