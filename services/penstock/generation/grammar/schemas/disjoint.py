"""Test of two schemas for a common value: without one, `oneOf` can be `anyOf`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.generation.grammar.schemas.document import write_json
from penstock.generation.grammar.schemas.words import types_of

Resolve = Callable[[Any], Any]
_MAX_DEPTH = 8


def are_disjoint(one: Any, other: Any, resolve: Resolve, depth: int = 0) -> bool:
    """Return True if their own keywords show that no value satisfies both; False says nothing.

    `resolve` returns the target of a schema that is a plain reference, and any other schema unchanged.
    """
    one, other = resolve(one), resolve(other)
    if one is False or other is False:
        return True
    if depth > _MAX_DEPTH or not isinstance(one, dict) or not isinstance(other, dict):
        return False
    for word in ("anyOf", "oneOf"):
        if isinstance(one.get(word), list):
            return all(are_disjoint(part, other, resolve, depth + 1) for part in one[word])
        if isinstance(other.get(word), list):
            return all(are_disjoint(one, part, resolve, depth + 1) for part in other[word])
    values, others = _values(one), _values(other)
    if values is not None and others is not None and not values & others:
        return True
    types = types_of(one) & types_of(other)
    if not types:
        return True
    if types == {"string"}:
        return _apart(one, other, "minLength", "maxLength")
    if types == {"number"}:
        return _apart(one, other, "minimum", "maximum")
    return types == {"object"} and any(
        are_disjoint(_property(one, name), _property(other, name), resolve, depth + 1)
        for name in {*_names(one), *_names(other)}
    )


def _values(schema: dict[str, Any]) -> set[str] | None:
    """Return the values as JSON texts; None: not listed, or with numbers: their texts tell nothing (1 and 1.0)."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list) or not all(isinstance(one, str | bool | None) for one in listed):
        return None
    return {write_json(value) for value in listed}


def _apart(one: dict[str, Any], other: dict[str, Any], least: str, most: str) -> bool:
    return any(
        isinstance(low := left.get(least), int | float)
        and isinstance(high := right.get(most), int | float)
        and low > high
        for left, right in ((one, other), (other, one))
    )


def _names(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _property(schema: dict[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name, True) if isinstance(properties, dict) else True
