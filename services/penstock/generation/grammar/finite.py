"""Test for a finite document of a JSON schema: for a schema without one, llguidance would write for ever."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote


def has_finite_document(schema: dict[str, Any]) -> bool:
    """Return False when every document would have to contain another one of its own kind.

    It follows `$ref` within the schema, `allOf`, `anyOf`, `oneOf`, required properties and the least items of arrays.
    All other keywords count as finite.
    """
    return _FiniteSearch(schema).ends(schema)


class _FiniteSearch:
    """Depth-first search for a finite document. A reference that leads to itself has none."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._open: set[str] = set()
        self._finite: set[str] = set()

    def ends(self, schema: Any) -> bool:
        if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
            return True
        if "$ref" in schema and not self._reference_ends(schema["$ref"]):
            return False
        if not all(self.ends(part) for part in _list(schema, "allOf")):
            return False
        if any(parts and not any(map(self.ends, parts)) for parts in (_list(schema, "anyOf"), _list(schema, "oneOf"))):
            return False
        # Without a type, a number is a document.
        match schema.get("type"):
            case "object" | ["object"]:
                return all(self.ends(part) for part in _required(schema))
            case "array" | ["array"]:
                return all(self.ends(part) for part in _least_items(schema))
        return True

    def _reference_ends(self, reference: Any) -> bool:
        if not isinstance(reference, str) or not reference.startswith("#") or reference in self._finite:
            return True
        if reference in self._open:
            return False
        self._open.add(reference)
        ends = self.ends(self._target(reference))
        self._open.discard(reference)
        if ends:
            self._finite.add(reference)
        return ends

    def _target(self, reference: str) -> Any:
        """Return the target of a JSON pointer; None for other text, and for a pointer without a target."""
        found: Any = self._root
        for step in unquote(reference).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(name)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return None if reference[1:2] not in ("", "/") else found


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _required(schema: dict[str, Any]) -> list[Any]:
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    others = schema.get("additionalProperties")
    return [known.get(name, others) for name in _list(schema, "required") if isinstance(name, str)]


def _least_items(schema: dict[str, Any]) -> list[Any]:
    least = schema.get("minItems", 0)
    if not isinstance(least, int) or least < 1:
        return []
    first = _list(schema, "prefixItems")[:least]
    return first if len(first) == least else [*first, schema.get("items")]
