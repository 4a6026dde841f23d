"""Shapes that the values of keywords must have: with another one a keyword has no meaning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from penstock.generation.grammar.schemas.refusal import Refusal
from penstock.generation.grammar.schemas.words import ALL_TYPES

_TYPES = ALL_TYPES | {"integer"}


def check_shapes(schema: Mapping[str, Any], path: str) -> None:
    """Raise Refusal for the first keyword with a value of the wrong kind. Parts are not checked."""
    for word, value in schema.items():
        found = _SHAPES.get(word)
        if found is not None and not found[0](value):
            raise Refusal(path, word, f"must be {found[1]}")


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond doubles, which nothing here reckons with
        return False


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_type(value: Any) -> bool:
    listed = value if isinstance(value, list) else [value]
    return all(isinstance(one, str) and one in _TYPES for one in listed)


def _by_name(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_one, value.values()))


_Shape = tuple[Callable[[Any], bool], str]
_SCHEMA: _Shape = (_is_schema, "a schema")
_SCHEMAS: _Shape = (_is_list, "a list of schemas")
_NAMED: _Shape = (lambda value: isinstance(value, dict), "an object of schemas")
_COUNT: _Shape = (_is_count, "a whole number of 0 or more")
_NUMBER: _Shape = (_is_number, "a number")
# In draft 4 these are flags of their neighbours.
_LIMIT: _Shape = (lambda value: _is_number(value) or isinstance(value, bool), "a number")
_TEXT: _Shape = (lambda value: isinstance(value, str), "a text")
_SHAPES: Mapping[str, _Shape] = {
    **dict.fromkeys(("additionalProperties", "additionalItems", "contains", "propertyNames"), _SCHEMA),
    **dict.fromkeys(("not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties"), _SCHEMA),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("properties", "patternProperties"), _NAMED),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minContains", "maxContains"), _COUNT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _LIMIT),
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef"), _TEXT),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "items": (lambda value: _is_schema(value) or _is_list(value), "a schema, or a list of schemas"),
    "required": (_is_names, "a list of names"),
    "dependentSchemas": (_by_name(_is_schema), "an object of schemas"),
    "dependentRequired": (_by_name(_is_names), "an object of lists of names"),
    "dependencies": (_by_name(lambda value: _is_schema(value) or _is_names(value)), "an object of schemas or names"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    "enum": (_is_list, "a list"),
    "type": (_is_type, f"one of {', '.join(sorted(_TYPES))}, or a list of these"),
}
