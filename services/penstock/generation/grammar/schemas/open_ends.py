"""Bounds where a schema has none: a model that repeats itself would do so until the request's last token.

Each makes the schema narrower, never wider: documents within the bounds satisfy the schema.
"""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

from penstock.generation.grammar.grammar_limits import JsonBounds
from penstock.generation.grammar.schemas.document import WrittenFloat
from penstock.generation.grammar.schemas.words import types_of

# Most digits before the point that a double surely has, and after it that llguidance counts, with a margin.
_MOST_BEFORE = 15
_MOST_BEHIND = 9
# llguidance calculates with 64 bits; its doubles would turn the lowest of these numbers into others.
_LEAST_INTEGER, _MOST_INTEGER = -(2**63) + 1024, 2**63 - 1
# With at most this many optional keys every combination of them is written out.
_MOST_OPTIONAL = 4
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def bound_number(schema: dict[str, Any], bounds: JsonBounds) -> None:
    """Bound the digits of a number in place, only if its type is named: without a type it may be anything."""
    named = schema.get("type")
    listed = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if not bounds.max_json_digits or not {"integer", "number"} & {*listed}:
        return
    if "number" not in listed:
        _bound_integer(schema, 10**bounds.max_json_digits - 1)
        return
    digits = min(bounds.max_json_digits, _MOST_BEFORE)
    most = 10**digits - 1
    behind = min(digits, _MOST_BEHIND)
    limits = [schema[word] for word in (*_LOWER, *_UPPER) if _is_number(schema.get(word))]
    if any(abs(limit) >= most or 0 < abs(limit) < 10 ** (3 - behind) for limit in limits):
        return
    if not any(_is_number(schema.get(word)) for word in _LOWER):
        schema["minimum"] = -most
    if not any(_is_number(schema.get(word)) for word in _UPPER):
        schema["maximum"] = most
    schema.setdefault("multipleOf", WrittenFloat(f"{Decimal(1).scaleb(-behind):f}"))


def _bound_integer(schema: dict[str, Any], most: int) -> None:
    """Bound an integer in place. Bounds of the schema beyond `most` widen it."""
    low = [schema[word] for word in _LOWER if _is_number(schema.get(word))]
    high = [schema[word] for word in _UPPER if _is_number(schema.get(word))]
    if any(abs(limit) >= most for limit in (*low, *high)):
        most = _MOST_INTEGER
    if not high and not any(limit >= _MOST_INTEGER for limit in low):
        schema["maximum"] = min(most, _MOST_INTEGER)
    if not low and not any(limit <= _LEAST_INTEGER for limit in high):
        schema["minimum"] = max(-most, _LEAST_INTEGER)
    elif low and max(low) < _LEAST_INTEGER:
        # Beyond what llguidance takes.
        schema.pop("exclusiveMinimum", None)
        schema["minimum"] = _LEAST_INTEGER


def bound_text(schema: dict[str, Any], bounds: JsonBounds) -> None:
    """Bound the characters of a text in place."""
    if bounds.max_json_characters and "string" in types_of(schema) and "type" in schema:
        least = schema.get("minLength", 0)
        if "maxLength" not in schema and isinstance(least, int | float) and least <= bounds.max_json_characters:
            schema["maxLength"] = bounds.max_json_characters


def bound_items(schema: dict[str, Any], bounds: JsonBounds) -> None:
    """Bound the items of an array in place, after those in `prefixItems`."""
    if bounds.max_json_items and "array" in types_of(schema) and "type" in schema:
        least, named = schema.get("minItems", 0), len(schema.get("prefixItems") or ())
        if "maxItems" not in schema and isinstance(least, int | float) and least <= bounds.max_json_items:
            schema["maxItems"] = named if schema.get("items") is False else named + bounds.max_json_items


def bound_keys(schema: dict[str, Any], bounds: JsonBounds) -> None:
    """Bound the keys of an object in place, besides those that it names.

    llguidance counts only where no named key may be left out. So the object is told once for each choice of the keys
    that may be; where these are many, with none or all of them, or without any key that it does not name.
    """
    is_open = schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))
    if not bounds.max_json_keys or not is_open or "type" not in schema or "object" not in types_of(schema):
        return
    required = {*(schema.get("required") or ())}
    named = schema.get("properties") or {}
    optional = [name for name, one in named.items() if name not in required and one is not False]
    if schema.keys() & {"minProperties", "maxProperties"} and optional:
        return
    if not optional:
        if "maxProperties" not in schema and schema.get("minProperties", 0) <= len(required) + bounds.max_json_keys:
            schema["maxProperties"] = len(required) + bounds.max_json_keys
        return
    if len(optional) <= _MOST_OPTIONAL:
        chosen = [one for size in range(len(optional) + 1) for one in itertools.combinations(optional, size)]
        told = []
    else:
        chosen = [(), tuple(optional)]
        told = [{"properties": dict.fromkeys([*required, *named], True), "additionalProperties": False}]
    for names in chosen:
        others = {name: False for name in optional if name not in names}
        one: dict[str, Any] = {"maxProperties": len(required) + len(names) + bounds.max_json_keys}
        told.append(one | ({"required": list(names)} if names else {}) | ({"properties": others} if others else {}))
    schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": told}]


def bound_names(schema: dict[str, Any], bounds: JsonBounds) -> None:
    """Bound the characters of keys in place, if all keys are free: with named keys llguidance accepts no such rule."""
    values = schema.get("additionalProperties", True)
    if not bounds.max_json_characters or values is False or "type" not in schema or "object" not in types_of(schema):
        return
    if not any(schema.get(word) for word in ("properties", "patternProperties", "required")):
        schema["patternProperties"] = {rf"^[\s\S]{{0,{bounds.max_json_characters}}}$": values}
        schema["additionalProperties"] = False


def anything(depth: int, bounds: JsonBounds) -> dict[str, Any]:
    """Return the schema of any value nested at most `depth` deep: its parts are any0, any1 and so on."""
    number: dict[str, Any] = {"type": "number"}
    # With more digits than a number that may have a point.
    whole: dict[str, Any] = {"type": "integer"}
    text: dict[str, Any] = {"type": "string"}
    bound_number(number, bounds)
    bound_number(whole, bounds)
    bound_text(text, bounds)
    options: list[dict[str, Any]] = [{"type": "null"}, {"type": "boolean"}, number, whole, text]
    if depth:
        part = {"$ref": f"#/$defs/any{depth - 1}"}
        array, members = {"type": "array", "items": part}, {"type": "object", "additionalProperties": part}
        bound_items(array, bounds)
        bound_keys(members, bounds)
        bound_names(members, bounds)
        options += [array, members]
    return {"anyOf": options}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
