"""Bounds and rewritings of schemas leave out no valid document without need, and let in no invalid one."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from typing import Any

import pytest
from factories.engine.grammars import accepts, grammar_tokenizer
from penstock.generation.grammar.matcher_state import CompiledGrammar
from penstock.generation.grammar.matching import new_matcher
from penstock.generation.grammar.schemas.document import read_json, write_json
from penstock.generation.grammar.schemas.multiples import exact_multiples
from penstock.generation.grammar.schemas.refused_part import find_refused_part
from penstock.generation.grammar.trial_process import answer_to

INTEGER, TEXT, NUMBER = {"type": "integer"}, {"type": "string"}, {"type": "number"}
TWO: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
MANY = {
    "type": "object",
    "properties": {f"k{at}": {"type": "null"} for at in range(70)},
    "required": [f"k{at}" for at in range(70)],
}
ALL_OF_MANY = json.dumps(dict.fromkeys(MANY["required"]))
NESTED = '{"a": ' + "[" * 30 + "]" * 30 + "}"
OBJECT, ARRAY = {"type": "object"}, {"type": "array"}
FOUR = {"max_characters": 4}
# Deeper than a definition of two levels, or anything.
ALL_DEPTHS = [{}, {"a": {}}, {"a": {"a": {}}}, {"a": {"a": {"a": {}}}}]
DEEP = {"a": ALL_DEPTHS[-1]}
SELF = {**OBJECT, "properties": {"a": {"$ref": "#/$defs/T"}}}
# Schema, settings, and values that it lists, all of which may be written.
LISTED: list[tuple[dict[str, Any], dict[str, Any], list[Any]]] = [
    ({**OBJECT, "const": {"abcdef": 1}}, FOUR, [{"abcdef": 1}]),
    ({"anyOf": [{**OBJECT, "const": {"abcdef": 1}}, {"type": "null"}]}, FOUR, [{"abcdef": 1}, None]),
    ({**OBJECT, "enum": [{"abcdef": 1}, {"a": 1}]}, FOUR, [{"abcdef": 1}, {"a": 1}]),
    ({**OBJECT, "enum": [json.loads(ALL_OF_MANY), {}]}, {}, [json.loads(ALL_OF_MANY), {}]),
    ({**OBJECT, "enum": [{"a": 1, "b": 2}], "properties": {"a": {}}}, {}, [{"a": 1, "b": 2}]),
    ({**OBJECT, "enum": [{"a": "abcdef"}], "properties": {"a": TEXT}}, FOUR, [{"a": "abcdef"}]),
    ({**ARRAY, "enum": [["abcdef"]], "items": TEXT}, FOUR, [["abcdef"]]),
    ({**ARRAY, "enum": [[{"abcdef": 1}], []], "items": OBJECT}, FOUR, [[{"abcdef": 1}], []]),
    ({**ARRAY, "enum": [[[1, 2, 3]], []], "items": ARRAY}, {"max_items": 2}, [[[1, 2, 3]], []]),
    ({**ARRAY, "enum": [[10**5], [1]], "items": INTEGER}, {"max_digits": 3}, [[10**5], [1]]),
    ({**OBJECT, "enum": [{"abcdef": 1}, {}]}, {"strict": True}, [{"abcdef": 1}, {}]),
    ({"allOf": [{"enum": [{"a": 1, "b": 2}]}, {**OBJECT, "properties": {"a": {}}}]}, {}, [{"a": 1, "b": 2}]),
    ({"allOf": [{"enum": [{"a": "abcdef"}]}, {**OBJECT, "properties": {"a": TEXT}}]}, FOUR, [{"a": "abcdef"}]),
    (
        {**OBJECT, "properties": {"a": TEXT}, "$ref": "#/$defs/T", "$defs": {"T": {"const": {"a": "abcdef"}}}},
        FOUR,
        [{"a": "abcdef"}],
    ),
    ({**ARRAY, "enum": [[[[[[1]]]]]], "items": {}}, {"max_depth": 2}, [[[[[[1]]]]]]),
    ({**OBJECT, "enum": [DEEP, {}], "additionalProperties": {}}, {"max_depth": 2}, [DEEP, {}]),
    ({**SELF, "enum": [DEEP, {}], "$defs": {"T": SELF}}, {"max_depth": 1}, [DEEP, {}]),
    ({"$ref": "#/$defs/T", "$defs": {"T": {**SELF, "enum": ALL_DEPTHS}}}, {"max_depth": 1}, ALL_DEPTHS),
]
FEW = {"max_keys": 2}
FREE = '"x": 1, "y": 1'
FIVE: dict[str, Any] = {"type": "object", "properties": dict.fromkeys("abcde", INTEGER)}
SOME = '"a": 1, "c": 1'
ALL = ", ".join(f'"{name}": 1' for name in "abcde")
# Schema -> documents that may be written, and that may not.
TOLD: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # Keys that the schema does not name come without all those that it does.
    ({**TWO, "additionalProperties": TEXT}, ['{"c": "x"}', '{"a": 1, "c": "x"}', '{"b": 1}'], ['{"c": 1}']),
    ({**TWO, "additionalProperties": True}, ['{"c": "x"}', '{"a": 1, "c": "x"}'], ['{"a": "x"}']),
    ({**TWO, "additionalProperties": TEXT, "minProperties": 1}, ['{"c": "x"}', '{"b": 1}'], ["{}"]),
    ({**TWO, "patternProperties": {"^x": TEXT}, "additionalProperties": False}, ['{"xc": "x"}'], ['{"c": "x"}']),
    # Those keys are bounded whichever of the named ones are left out.
    *(
        (
            {**TWO, "required": required, "additionalProperties": INTEGER, "x-guidance": FEW},
            [f"{{{named}{FREE}}}" for named in ('"a": 1, ', '"a": 1, "b": 1, ')] + ['{"a": 1, "x": 1}', '{"a": 1}'],
            [f'{{{named}{FREE}, "z": 1}}' for named in ('"a": 1, ', '"a": 1, "b": 1, ')] + ['{"a": "x"}'],
        )
        for required in ([], ["a"])
    ),
    (
        {**TWO, "type": ["object", "null"], "patternProperties": {"^x": INTEGER}, "x-guidance": FEW},
        ["null", '{"xa": 1, "xb": 1}', '{"b": 1, "xa": 1, "xb": 1}'],
        ['{"xa": 1, "xb": 1, "xc": 1}', '{"b": 1, "xa": 1, "xb": 1, "xc": 1}'],
    ),
    # Of many that may be left out, none or all are there, or no other key is.
    (
        {**FIVE, "additionalProperties": INTEGER, "x-guidance": FEW},
        [f"{{{SOME}}}", f"{{{ALL}}}", f"{{{FREE}}}", f"{{{ALL}, {FREE}}}", "{}"],
        [f'{{{FREE}, "z": 1}}', f'{{{ALL}, {FREE}, "z": 1}}', f'{{{SOME}, "x": 1}}'],
    ),
    (
        {**FIVE, "required": ["r"], "patternProperties": {"^x": INTEGER}, "x-guidance": FEW},
        ['{"a": 1, "e": 1, "r": 1}', '{"r": 1, "x": 1, "xx": 1}', f'{{{ALL}, "r": 1, "x": 1}}'],
        ['{"r": 1, "x": 1, "xx": 1, "xy": 1}', '{"a": 1, "e": 1, "r": 1, "x": 1}', '{"e": 1}'],
    ),
    # A bound is none beside a schema that may ask for more.
    ({"type": "object", "allOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": MANY}}, [ALL_OF_MANY], ["{}"]),
    ({"type": "object", "$ref": "#/$defs/B", "$defs": {"B": MANY}}, [ALL_OF_MANY], ["{}"]),
    (
        {**INTEGER, "$ref": "#/$defs/B", "$defs": {"B": {"minimum": 10**16}}},
        ["10000000000000000"],
        ["9999999999999999"],
    ),
    # Anything has a depth, however it is written.
    ({"type": "object", "properties": {"a": True}, "required": ["a"]}, ['{"a": [1]}'], [NESTED]),
    ({"type": "array", "prefixItems": [True], "items": False}, ["[[1]]"], ["[" * 30 + "]" * 30]),
    # What every item is, by JSON's own measure of equality.
    ({"type": "array", "items": {"const": 1}, "contains": {"const": 1}}, ["[1]"], ["[]"]),
    # The first items, as drafts before 2020-12 list them.
    ({"type": "array", "items": [TEXT], "unevaluatedItems": False}, ['["x"]'], ['["x", 1]']),
    # Names of keys.
    ({"type": "object", "propertyNames": {"enum": ["a", 1], "type": "string"}}, ['{"a": 1}'], ['{"b": 1}']),
    (
        {"type": "object", "properties": {"a": INTEGER}, "propertyNames": {"pattern": "^[a-c]$"}},
        ['{"a": 1}'],
        ['{"a": "x"}', '{"b": 1}'],
    ),
    # Sets: in any order where these are few, of any size.
    ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}}, ['["b", "a"]'], ['["b", "b"]']),
    (
        {"type": "array", "uniqueItems": True, "items": {"enum": [*range(10)]}},
        ["[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]", "[]", "[9]"],
        ["[1, 1]"],
    ),
    (
        {"type": "array", "uniqueItems": True, "items": {"enum": [1, 1.0, True]}},
        ["[1, true]", "[true, 1]"],
        ["[1, 1.0]"],
    ),
    ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", 1], **INTEGER}}, ["[1]"], ['["a"]']),
    # Integers of 64 bits, and the bounds that a schema names.
    (INTEGER, ["1234567890123456789", "9223372036854775807", "-1234567890123456789"], ["1" * 20]),
    ({**INTEGER, "format": "int64", "minimum": 0}, ["9223372036854775807", "0"], ["-1", "9" * 19]),
    (
        {**INTEGER, "minimum": -(2**63), "maximum": 2**63 - 1},
        ["9223372036854775807", "-9223372036854774784"],
        ["9223372036854775808", "-9223372036854775809"],
    ),
    ({**INTEGER, "minimum": 0, "maximum": 2**64 - 1}, ["9223372036854775807"], ["18446744073709551616", "-1"]),
    ({**INTEGER, "minimum": 10**18}, ["1721999999999999999"], ["999999999999999999", "9" * 30]),
    ({**INTEGER, "maximum": 10**18, "x-guidance": {"max_digits": 2}}, ["1000000000000000000"], ["1" * 19]),
    (NUMBER, ["3.14159265", "999999999999999"], ["1" * 16]),
    ({}, ["1234567890123456789", "1.5"], ["9" * 20]),
    # Characters of keys, where all of them are free.
    (
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "x-guidance": {"max_characters": 3}},
        ['{"abc": 1}', '{"": 1}', '{"\\n\\"": 1, "b": 2}'],
        ['{"abcd": 1}', "{}", '{"a": "x"}'],
    ),
    ({"x-guidance": {"max_characters": 3}}, ['{"abc": [{"abc": "abc"}]}'], ['{"abcd": 1}', '[{"abcd": 1}]']),
    # Objects and arrays that are listed are as they are, whatever end their schema would have else.
    *(
        ({**schema, "x-guidance": settings}, [json.dumps(value) for value in values], [])
        for schema, settings, values in LISTED
    ),
    # Multiples of values that are listed are those of them that validators take.
    ({"enum": [0.1, 0.2, 1.2, "a"], "multipleOf": 0.1}, ["0.1", "0.2", '"a"'], ["1.2"]),
    ({"const": 3, "multipleOf": 0.1, **NUMBER}, ["3"], ["0.3"]),
    ({**NUMBER, "multipleOf": 0.01, "minimum": 0}, ["99.98", "19.75", "1000000.25"], ["19.99", "0.29", "1000000.26"]),
    ({"type": ["integer", "null"], "multipleOf": 0.1}, ["7", "null"], ["0.5"]),
    ({**NUMBER, "multipleOf": 0.7, "minimum": 0, "maximum": 20}, ["1.4"], ["10.5", "2"]),
    # Alternatives that are known to be apart.
    ({"oneOf": [INTEGER, TEXT], "anyOf": [{"const": 1}, {"const": "a"}]}, ["1", '"a"'], ["2", '"b"']),
    (
        {"oneOf": [INTEGER, {"minimum": 3}], "x-guidance": {"coerce_one_of": True}},
        ["5"],
        ["-1.5"],
    ),
]
P_A = {"type": "object", "properties": {"a": INTEGER}}
P_B = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}
# What cannot be told without a loss: schema -> what the message says.
REFUSED: list[tuple[Any, str]] = [
    ({**NUMBER, "multipleOf": 0.7}, "at #: `multipleOf` of this fraction is supported between a minimum and"),
    ({**NUMBER, "multipleOf": 1.1, "minimum": 0}, "at #: `multipleOf` of this fraction is supported between"),
    ({**INTEGER, "multipleOf": 1.1}, "at #: `multipleOf` of this fraction is supported between a minimum and"),
    ({"const": 10**400, "multipleOf": 0.1}, "is not supported: OverflowError while it was made simple"),
    ({"type": "string", "format": ["x"]}, "at #: `format` must be a text"),
    ({"type": "string", "format": {}}, "at #: `format` must be a text"),
    ({**INTEGER, "minimum": 10**400}, "at #: `minimum` must be a number"),
    ({**TEXT, "maxLength": 10**400}, "at #: `maxLength` must be a whole number"),
    ({"type": "object", "propertyNames": {"format": []}}, "at #/propertyNames: `format` must be a text"),
    ({"type": "array", "items": {"const": 1}, "contains": {"const": True}}, "at #: `contains` is not supported"),
    (
        {"type": "array", "prefixItems": [TEXT], "items": INTEGER, "contains": INTEGER},
        "at #: `contains` is not supported",
    ),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"p": P_A}, "required": ["p"]},
                {"type": "object", "properties": {"p": P_B}, "required": ["p"]},
            ]
        },
        "at #: `oneOf` is supported where no value can satisfy two",
    ),
    ({"type": "object", "propertyNames": {"enum": ["a", "bb"], "maxLength": 1}}, "at #: `propertyNames` is supported"),
    (
        {"type": "object", "propertyNames": {"const": "a", "pattern": "b"}, "additionalProperties": TEXT},
        "at #: `propertyNames` is supported for one of",
    ),
    (
        {
            "type": "object",
            "properties": {"a": INTEGER},
            "additionalProperties": TEXT,
            "propertyNames": {"pattern": "^[a-z]$"},
        },
        "at #: `propertyNames` of a pattern is not supported with named keys",
    ),
    ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "bb"], "maxLength": 1}}, "at #: `uniqueItems` "),
    (
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a"]}, "allOf": [{"minItems": 1}]},
        "at #: `uniqueItems` ",
    ),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [*range(30)]}}, "at #: `uniqueItems` is not supported"),
]


def answer_of(document: Any) -> dict[str, str]:
    return answer_to(grammar_tokenizer(), {"kind": "json_schema", "text": json.dumps(document), "choices": ()}, 10.0)


def compiled(document: Any) -> CompiledGrammar:
    answer = answer_of(document)
    assert "lark" in answer, answer
    return CompiledGrammar(new_matcher(grammar_tokenizer(), answer["lark"]), grammar_tokenizer(), "constraint")


@pytest.mark.parametrize(("document", "right", "wrong"), TOLD, ids=[json.dumps(one)[:60] for one, _, _ in TOLD])
def test_valid_documents_are_possible_and_invalid_ones_are_not(
    document: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    grammar = compiled(document)
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize(("document", "message"), REFUSED, ids=[json.dumps(one)[:60] for one, _ in REFUSED])
def test_what_would_lose_documents_is_refused_by_name(document: Any, message: str) -> None:
    assert answer_of(document).get("refused", "").startswith(message), answer_of(document)


@pytest.mark.parametrize("factor", ["0.1", "0.2", "0.01", "0.05", "0.001", "0.3", "0.03"])
def test_multiples_that_are_written_are_those_of_a_validator(factor: str) -> None:
    found = exact_multiples(read_json(f'{{"type": "number", "multipleOf": {factor}}}'), "#")
    assert found is not None
    listed, beyond = found["anyOf"]
    draw, step = random.Random(7), Fraction(write_json(beyond["multipleOf"]))
    far = [draw.randrange(10**digits) * step for digits in range(1, 14) for _ in range(200)]
    for value in (*map(float, listed["enum"]), *map(float, far)):
        quotient = value / float(factor)
        assert quotient == int(quotient), (value, factor)


def test_numbers_and_formats_are_compiled_once_for_all_their_places() -> None:
    when = {"type": ["string", "null"], "format": "date-time", "title": "t"}
    document = {"type": "object", "properties": {f"k{at}": when if at % 2 else INTEGER for at in range(50)}}
    lark = answer_of(document)["lark"]
    assert lark.count("02-29") == 1
    assert lark.count('"maximum"') == 1


def test_the_bound_of_keys_stays_where_no_named_one_may_be_left_out() -> None:
    document = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": INTEGER}
    grammar = compiled({**document, "x-guidance": {"max_keys": 1}})
    assert accepts(grammar, '{"a": 1, "c": 1}')
    assert not accepts(grammar, '{"a": 1, "c": 1, "d": 1}')


def chain_of(length: int, fault: Any) -> dict[str, Any]:
    models: dict[str, Any] = {
        f"M{at}": {"type": "object", "properties": {"next": {"$ref": f"#/$defs/M{at + 1}"}, "when": NUMBER}}
        for at in range(length)
    }
    models[f"M{length}"] = {"type": "object", "properties": {"fine": TEXT, "z": fault}}
    return {"$ref": "#/$defs/M0", "$defs": models}


@pytest.mark.parametrize("length", [1, 60])
def test_a_fault_behind_references_has_its_place(length: int) -> None:
    said = answer_of(chain_of(length, {**TEXT, "pattern": "(?=a)b"}))["refused"]
    assert said.startswith(f"at #/$defs/M{length}/properties/z: `pattern` invalid regex"), said


def test_the_search_for_a_place_tries_little_and_has_an_end() -> None:
    schema = chain_of(60, {**TEXT, "pattern": "(?=a)b"})
    tried: list[str] = []

    def is_refused(text: str) -> bool:
        tried.append(text)
        return new_matcher(grammar_tokenizer(), f"start: %json {text}").is_error()

    assert find_refused_part(schema, is_refused, max_seconds=60.0) == ("#/$defs/M60/properties/z", "pattern")
    # Of definitions together, and then of each in a group; none of them with all the others in it.
    assert len(tried) < 30
    assert max(map(len, tried)) < len(write_json(schema)) // 2
    tried.clear()
    assert find_refused_part(schema, is_refused, max_seconds=-1.0) == ("#", "")
    assert tried == []


def test_fifty_models_of_twenty_fields_compile() -> None:
    fields = [
        {"type": "string", "format": "date-time"} if at % 3 == 0 else {**INTEGER, "minimum": at} for at in range(20)
    ]
    names = [f"p{at}" for at in range(20)]
    models: dict[str, Any] = {
        f"M{at}": {"type": "object", "properties": dict(zip(names, fields, strict=True)), "required": names}
        for at in range(50)
    }
    for at in range(1, 50):
        models[f"M{at - 1}"]["properties"]["next"] = {"$ref": f"#/$defs/M{at}"}
    assert "lark" in answer_of({"$ref": "#/$defs/M0", "$defs": models})
