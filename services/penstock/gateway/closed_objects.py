"""Closing of a schema's objects, for `strict`: with keywords of JSON Schema that every generation service knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_WORDS = frozenset(
    {
        *("properties", "patternProperties", "required", "additionalProperties", "unevaluatedProperties"),
        *("propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    }
)
_COMPOSING = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"})
# Keywords that forbid closing an object: they allow further keys, or describe an object in several places.
_OPEN = _COMPOSING | _WORDS - {"properties", "patternProperties", "required", "maxProperties", "dependentRequired"}
_DEFINITIONS = ("$defs", "definitions")
_DEFINITION = re.compile(r"#/(\$defs|definitions)/[^/]+")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties", "then", "else", "additionalItems")
_NAMED = ("properties", "patternProperties", "dependentSchemas", *_DEFINITIONS)


def close_objects(schema: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a schema with `additionalProperties: false` in objects that are silent about it, and True if that is all.

    A schema that is a part of another's, by allOf and its like, is left open: closed alone, it would shut out the
    other's keys. One that lists objects or arrays stays as it is: closed, it could shut out what it lists.
    """
    targets = {str(part.get("$ref")) for part in _parts(schema) if "$ref" in part}
    if not all(map(_DEFINITION.fullmatch, targets)):
        return dict(schema), False
    closing = _Closing(has_parts=bool(targets))
    closed = closing.run(schema, is_part=False)
    if closed != schema and _lists_values(schema):
        return dict(schema), False
    return closed, closing.is_whole


class _Closing:
    def __init__(self, *, has_parts: bool) -> None:
        """`has_parts`: definitions may be parts of other schemas."""
        self._has_parts = has_parts
        # False if an object without a named key was left open; a generation service closes it.
        self.is_whole = True

    def run(self, schema: Any, *, is_part: bool, is_definition: bool = False) -> Any:
        """Return the schema with its objects closed."""
        if not isinstance(schema, Mapping):
            return schema
        made = dict(schema)
        within = is_part or _is_joined(schema)
        for word in _MANY:
            if isinstance(made.get(word), list):
                inner = within and word != "prefixItems"
                made[word] = [self.run(one, is_part=inner) for one in made[word]]
        for word in _ONE:
            if word in made:
                made[word] = self.run(made[word], is_part=word in ("then", "else"))
        for word in _NAMED:
            if isinstance(made.get(word), dict):
                is_kept = word in _DEFINITIONS and self._has_parts
                made[word] = {
                    name: self.run(one, is_part=is_kept or word == "dependentSchemas", is_definition=is_kept)
                    for name, one in made[word].items()
                }
        if _may_close(schema):
            if not is_part:
                made["additionalProperties"] = False
            elif is_definition and not schema.keys() & _WORDS:
                self.is_whole = False
        return made


def _lists_values(schema: Any) -> bool:
    """True where objects or arrays are listed anywhere in a schema."""
    if isinstance(schema, list):
        return any(map(_lists_values, schema))
    if not isinstance(schema, Mapping):
        return False
    values = schema.get("enum")
    listed = [schema.get("const"), *(values if isinstance(values, list) else ())]
    return any(isinstance(value, dict | list) for value in listed) or any(map(_lists_values, schema.values()))


def _may_close(schema: Mapping[str, Any]) -> bool:
    """True for an object that is silent about further keys, and needs none."""
    kind, named = schema.get("type"), schema.keys() & {"properties", "patternProperties"}
    if schema.keys() & _OPEN or not (kind in ("object", ["object"]) or named):
        return False
    required, known = schema.get("required"), schema.get("properties")
    # A required key is also a named key.
    return not required or (
        isinstance(required, list) and isinstance(known, dict) and {*map(str, required)} <= {*known}
    )


def _is_joined(schema: Mapping[str, Any]) -> bool:
    """True when several schemas describe one value."""
    joined = schema.get("allOf")
    composing = [word for word in _COMPOSING if word in schema]
    return (
        len(composing) > 1
        or bool(composing and schema.keys() & _WORDS)
        or (isinstance(joined, list) and len(joined) > 1)
    )


def _parts(schema: Any, *, is_part: bool = False) -> Iterator[Mapping[str, Any]]:
    """All schemas that describe a value together with others."""
    if not isinstance(schema, Mapping):
        return
    within = is_part or _is_joined(schema)
    if within:
        yield schema
    for word in _MANY:
        if isinstance(schema.get(word), list):
            for one in schema[word]:
                yield from _parts(one, is_part=within and word != "prefixItems")
    for word in _ONE:
        yield from _parts(schema.get(word), is_part=word in ("then", "else"))
    for word in _NAMED:
        if isinstance(schema.get(word), dict):
            for one in schema[word].values():
                yield from _parts(one, is_part=word == "dependentSchemas")
