"""JSON as callers ask for it over HTTP: forms, strict, compact, and a json_object that has a schema."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.common.errors import InvalidArgument
from penstock.gateway.json_output import apply_settings, read_form, read_settings, with_settings

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRICT = {**SCHEMA, "additionalProperties": False}
CHAT = "response_format"
FORMS: list[tuple[dict[str, Any], bool, tuple[str, str, Any] | None]] = [
    ({"type": "text"}, True, None),
    ({"type": "json_object"}, True, ("json_object", CHAT, True)),
    ({"type": "json_object", "schema": None}, True, ("json_object", CHAT, True)),
    ({"type": "json_object", "schema": SCHEMA}, True, ("json_schema", f"{CHAT}.schema", SCHEMA)),
    ({"type": "json_object", "schema": SCHEMA}, False, ("json_schema", f"{CHAT}.schema", SCHEMA)),
    ({"type": "json_object", "schema": SCHEMA, "strict": True}, True, ("json_schema", f"{CHAT}.schema", STRICT)),
    (
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        True,
        ("json_schema", f"{CHAT}.json_schema.schema", SCHEMA),
    ),
    (
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}},
        True,
        ("json_schema", f"{CHAT}.json_schema.schema", STRICT),
    ),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}, True, ("json_schema", "", SCHEMA)),
    ({"type": "json_schema", "schema": SCHEMA}, True, ("json_schema", f"{CHAT}.schema", SCHEMA)),
    ({"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}, False, ("json_schema", "", STRICT)),
]
REFUSED = [
    ({"type": "xml"}, True, f"{CHAT}.type"),
    ({"type": "json_object", "schema": "x"}, True, f"{CHAT}.schema"),
    ({"type": "json_schema"}, True, f"{CHAT}.json_schema.schema"),
    ({"type": "json_schema", "json_schema": 3}, True, f"{CHAT}.json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"schema": 3}}, True, f"{CHAT}.json_schema.schema"),
    ({"type": "json_schema", "name": "x"}, False, f"{CHAT}.schema"),
]


@pytest.mark.parametrize(("form", "nested", "found"), FORMS)
def test_a_form_is_an_option(form: dict[str, Any], nested: bool, found: tuple[str, str, Any] | None) -> None:
    made = read_form(form, CHAT, nested=nested)
    if found is None or found[1]:
        assert made == found
    else:
        assert made is not None
        assert (made[0], made[2]) == (found[0], found[2])


@pytest.mark.parametrize(("form", "nested", "field"), REFUSED)
def test_a_form_that_is_none_names_its_field(form: dict[str, Any], nested: bool, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        read_form(form, CHAT, nested=nested)
    assert raised.value.field == field


def test_vllms_settings_have_words_of_ours() -> None:
    outputs = {"disable_any_whitespace": True, "disable_additional_properties": True, "disable_fallback": True}
    assert read_settings(outputs, None) == {"compact": True, "strict": True}
    assert read_settings({"disable_any_whitespace": False}, " ?") == {"whitespace_pattern": " ?"}
    assert read_settings({"whitespace_pattern": ""}, None) == {"whitespace_pattern": ""}
    for wrong in ({"disable_any_whitespace": "yes"}, {"whitespace_pattern": 3}):
        with pytest.raises(InvalidArgument) as raised:
            read_settings(wrong, None)
        assert raised.value.field == f"structured_outputs.{next(iter(wrong))}"


SHUT = {"additionalProperties": False}
BARE = {"type": "object"}
OTHER = {"type": "object", "properties": {"b": {"type": "null"}}}
REFERENCE = {"$ref": "#/$defs/a"}
# Schemas, and what strict makes of them: words that earlier generation services know, too.
CLOSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "closed": (STRICT, STRICT),
    "no object": ({"type": "null"}, {"type": "null"}),
    "no named key": (BARE, {**BARE, **SHUT}),
    "within": (
        {"type": "array", "items": SCHEMA, "prefixItems": [BARE]},
        {"type": "array", "items": STRICT, "prefixItems": [{**BARE, **SHUT}]},
    ),
    "alternatives": ({"anyOf": [SCHEMA, {"type": "null"}]}, {"anyOf": [STRICT, {"type": "null"}]}),
    "values": ({**BARE, "additionalProperties": SCHEMA}, {**BARE, "additionalProperties": STRICT}),
    "open": ({**SCHEMA, "additionalProperties": True}, {**SCHEMA, "additionalProperties": True}),
    "names": ({**BARE, "propertyNames": {"enum": ["a"]}}, {**BARE, "propertyNames": {"enum": ["a"]}}),
    "required alone": ({**BARE, "required": ["a"]}, {**BARE, "required": ["a"]}),
    "definitions": ({**REFERENCE, "$defs": {"a": SCHEMA}}, {**REFERENCE, "$defs": {"a": STRICT}}),
    "pydantic's": ({"allOf": [REFERENCE], "$defs": {"a": SCHEMA}}, {"allOf": [REFERENCE], "$defs": {"a": STRICT}}),
    "parts": ({"allOf": [SCHEMA, OTHER]}, {"allOf": [SCHEMA, OTHER]}),
    "parts by name": (
        {"allOf": [REFERENCE, OTHER], "$defs": {"a": SCHEMA}},
        {"allOf": [REFERENCE, OTHER], "$defs": {"a": SCHEMA}},
    ),
    "a part": ({**SCHEMA, "anyOf": [OTHER]}, {**SCHEMA, "anyOf": [OTHER]}),
    "a key of that name": (
        {**BARE, "properties": {"additionalProperties": SCHEMA}},
        {**BARE, **SHUT, "properties": {"additionalProperties": STRICT}},
    ),
    "values that are none": ({"enum": [BARE], "default": BARE}, {"enum": [BARE], "default": BARE}),
    # What only the generation service can tell is left to it.
    **{
        f"listed {name}": (schema, {**schema, "x-guidance": {"strict": True}})
        for name, schema in {
            "beside its keys": {**SCHEMA, "enum": [{"a": 1, "b": 2}]},
            "above": {**BARE, "properties": {"o": SCHEMA}, "const": {"o": {"b": 1}}},
            "items": {"type": "array", "items": BARE, "enum": [[{"b": 1}]]},
            "in another part": {"allOf": [{"enum": [{"o": {"b": 1}}]}, {"properties": {"o": SCHEMA}}]},
            "by name": {"properties": {"o": {"const": {"b": 1}, **REFERENCE}}, "$defs": {"a": {"items": SCHEMA}}},
        }.items()
    },
    "a part that names none": (
        {"allOf": [REFERENCE, OTHER], "$defs": {"a": BARE}},
        {"allOf": [REFERENCE, OTHER], "$defs": {"a": BARE}, "x-guidance": {"strict": True}},
    ),
    "a part that is the whole": (
        {**BARE, "allOf": [{"$ref": "#"}, OTHER]},
        {**BARE, "allOf": [{"$ref": "#"}, OTHER], "x-guidance": {"strict": True}},
    ),
}


@pytest.mark.parametrize("case", CLOSED)
def test_strict_closes_objects_in_words_of_json_schema(case: str) -> None:
    given, closed = CLOSED[case]
    assert with_settings(given, {"strict": True}) == closed
    assert with_settings(given, {"strict": True, "compact": True})["x-guidance"]["compact"] is True


@pytest.mark.parametrize("schema", [{"type": "null"}, '{"type": "null"}'])
def test_settings_stand_in_the_schema(schema: Any) -> None:
    assert with_settings(schema, {"compact": True}) == {"type": "null", "x-guidance": {"compact": True}}
    assert with_settings(schema, {}) is schema


def test_settings_go_before_the_schemas_own() -> None:
    own = {"x-guidance": {"compact": False, "max_keys": 3}}
    assert with_settings(own, {"compact": True}) == {"x-guidance": {"compact": True, "max_keys": 3}}
    assert with_settings(True, {"compact": True}) == {"x-guidance": {"compact": True}}
    assert with_settings("no JSON", {"compact": True}) == "no JSON"


def test_any_object_with_settings_is_a_schema() -> None:
    options: dict[str, Any] = {"json_object": True}
    names = {"json_object": CHAT}
    apply_settings(options, names, {"compact": True})
    assert options == {"json_schema": {"type": "object", "x-guidance": {"compact": True}}}
    assert names["json_schema"] == CHAT
    options = {"regex": "a"}
    apply_settings(options, {}, {"compact": True})
    assert options == {"regex": "a"}
