"""Keywords of JSON Schema: the types that each is about, and the places of schemas within schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
OBJECT_WORDS = frozenset(
    (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    )
)  # fmt: skip
ARRAY_WORDS = frozenset(
    (
        "items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "uniqueItems",
        "unevaluatedItems", "minItems", "maxItems",
    )
)  # fmt: skip
STRING_WORDS = frozenset({"minLength", "maxLength", "pattern", "format"})
NUMBER_WORDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
# Words that put schemas together, or choose among them.
JOINING_WORDS = frozenset(
    {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$dynamicRef", "$recursiveRef"}
)
TYPES_OF = {
    word: kind
    for kind, words in (
        ("object", OBJECT_WORDS), ("array", ARRAY_WORDS), ("string", STRING_WORDS), ("number", NUMBER_WORDS),
    )
    for word in words
}  # fmt: skip
ASSERTIONS = frozenset(TYPES_OF) | JOINING_WORDS | {"type", "enum", "const"}
# Words with a schema, a list of schemas, or schemas by name as their value.
ONE = (
    "additionalProperties", "additionalItems", "items", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")


def parts(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the steps to each schema within this one, and the schema."""
    for word in ONE:
        if isinstance(schema.get(word), dict | bool):
            yield (word,), schema[word]
    for word in MANY:
        value = schema.get(word)
        for number, one in enumerate(value if isinstance(value, list) else ()):
            yield (word, str(number)), one
    for word in NAMED:
        value = schema.get(word)
        for name, one in value.items() if isinstance(value, dict) else ():
            if isinstance(one, dict | bool):
                yield (word, name), one


def types_of(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that `type` allows, integers as numbers; all types if it is absent or invalid."""
    named = schema.get("type")
    listed = [named] if isinstance(named, str) else named
    if not isinstance(listed, list) or not listed:
        return ALL_TYPES
    found = frozenset("number" if each == "integer" else each for each in listed if isinstance(each, str))
    return found if found <= ALL_TYPES else ALL_TYPES


def is_of(value: Any, named: Any) -> bool:
    """True when a JSON value is of one of the types in `type`."""
    listed = [named] if isinstance(named, str) else named
    match value:
        case bool():
            return "boolean" in listed
        case int() | float():
            return "number" in listed or ("integer" in listed and value == int(value))
        case str():
            return "string" in listed
        case None:
            return "null" in listed
    return ("array" if isinstance(value, list) else "object") in listed


def levels_of(value: Any) -> int:
    """Return the depth of nesting of a JSON value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((1 + levels_of(one) for one in inner), default=0)


def says_nothing(schema: Any) -> bool:
    """True for a schema that every value satisfies, as far as its own keywords show."""
    if isinstance(schema, bool):
        return schema
    return isinstance(schema, dict) and not (schema.keys() & ASSERTIONS)
