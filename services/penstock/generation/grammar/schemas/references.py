"""References of a schema: their targets, and a definition for each target and use."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote

from penstock.generation.grammar.schemas.words import parts

_MISSING = object()


class Asked(NamedTuple):
    """A wanted definition: a target, in one of its uses."""

    place: str
    # True: another schema is combined with it.
    is_part: bool
    # True: it is about values that a schema lists.
    is_listed: bool


class References:
    """Targets of `$ref`s within a document."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._names: dict[Asked, str] = {}
        self.waiting: list[Asked] = []
        # In a document with names and bases of its own a reference may mean something else; those are left unchanged.
        self.are_plain = not _has_names(root)

    def target(self, reference: Any) -> Any:
        """Return the target of a JSON pointer. Raises LookupError for one without, and for another reference."""
        base = self._root.get("$id")
        if isinstance(reference, str) and isinstance(base, str) and base and reference.startswith(base):
            reference = "#" + reference[len(base) :].removeprefix("#")
        if not isinstance(reference, str) or reference[:2] not in ("#", "#/"):
            raise LookupError("is supported within this schema only")
        found: Any = self._root
        for step in unquote(reference).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(name, _MISSING)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                found = _MISSING
            if found is _MISSING:
                raise LookupError("refers to nothing")
        return found

    def resolve(self, schema: Any) -> Any:
        """Return the target of a schema that is a plain reference, through any number of them; any other unchanged."""
        seen = set()
        while isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and schema["$ref"] not in seen:
            seen.add(schema["$ref"])
            try:
                target = self.target(schema["$ref"])
            except LookupError:
                return schema
            schema = target
        return schema

    def name_of(self, reference: str, is_part: bool, is_listed: bool) -> str:
        """Return the name of the definition of a target. The first call for a target makes the definition."""
        key = Asked(reference, is_part, is_listed)
        if key not in self._names:
            self._names[key] = f"{len(self._names)}"
            self.waiting.append(key)
        return self._names[key]


def _has_names(schema: Any, is_root: bool = True) -> bool:
    """True when a schema in it has a name or a base: `$anchor`, or an `$id` that is not the root's."""
    if not isinstance(schema, dict):
        return False
    if "$anchor" in schema or "$dynamicRef" in schema or "$recursiveRef" in schema:
        return True
    if not is_root and isinstance(schema.get("$id"), str):
        return True
    return any(_has_names(part, is_root=False) for _, part in parts(schema))
