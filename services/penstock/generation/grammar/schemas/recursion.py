"""An end for a schema that refers to itself: its definitions once more for every level, and nothing below the last.

llguidance follows a reference for ever, and a model that has begun to nest goes on until the request's last token. As
with other ends, what is written satisfies the schema, though not every document that does is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock.generation.grammar.schemas.words import MANY, NAMED, ONE, parts

_PREFIX = "#/$defs/"
# Schemas of the same value: a reference in one of them leads no deeper.
_SAME_VALUE = frozenset(("allOf", "anyOf", "oneOf"))
# Most definitions that are made of a group whose members refer to each other: a larger group keeps no bound.
_MOST_COPIES = 512


def bound_recursion(schema: dict[str, Any], depth: int) -> dict[str, Any]:
    """Return a simple schema in which a definition holds itself at most `depth` times; 0: any number of times.

    A schema whose documents are all deeper is returned as it is. Raises RecursionError for one nested too deeply.
    """
    definitions: dict[str, Any] = schema.get("$defs", {})
    groups = _groups({name: {*_names(one)} & definitions.keys() for name, one in definitions.items()})
    groups = {name: group for name, group in groups.items() if len(group) * (depth + 1) <= _MOST_COPIES}
    if not depth or not groups:
        return schema

    def ending_at(name: str, level: int) -> Callable[[str, bool], str | None]:
        """Names in a copy of `name` at a level: what a reference becomes, None where it would be too deep."""

        def renamed(other: str, is_inner: bool) -> str | None:
            if other not in groups:
                return other
            below = level + is_inner if groups[other] is groups.get(name) else 0
            return _copy_name(other, below) if below <= depth else None

        return renamed

    copies = {
        _copy_name(name, level): _with_names(definitions[name], ending_at(name, level))
        for level in reversed(range(depth + 1))
        for name in groups
    }
    dead = _dead(copies)
    if any(_copy_name(name, 0) in dead for name in groups):
        return schema
    alive = {
        name: _with_names(one, lambda other, _: None if other in dead else other)
        for name, one in copies.items()
        if name not in dead
    }
    rest = {name: _with_names(one, ending_at("", 0)) for name, one in definitions.items() if name not in groups}
    root = _with_names({word: value for word, value in schema.items() if word != "$defs"}, ending_at("", 0))
    return {**root, "$defs": {**rest, **alive}}


def _copy_name(name: str, level: int) -> str:
    return f"{name}-{level}"


def _names(schema: Any) -> Iterator[str]:
    """Make the names of all definitions that a schema refers to."""
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith(_PREFIX):
            yield reference.removeprefix(_PREFIX)
        for _, part in parts(schema):
            yield from _names(part)


def _groups(edges: dict[str, set[str]]) -> dict[str, frozenset[str]]:
    """Return each definition that leads to itself, with those that it leads to and that lead back (Kosaraju)."""
    backward: dict[str, set[str]] = {name: set() for name in edges}
    for name, others in edges.items():
        for other in others:
            backward[other].add(name)
    order: list[str] = []
    seen: set[str] = set()
    for name in edges:
        order += _last_first(name, edges, seen)[::-1]
    found: dict[str, frozenset[str]] = {}
    seen = set()
    for name in reversed(order):
        group = frozenset(_last_first(name, backward, seen))
        if len(group) > 1 or name in edges[name]:
            found |= dict.fromkeys(group, group)
    return found


def _last_first(name: str, edges: dict[str, set[str]], seen: set[str]) -> list[str]:
    """Return what is reached from a name and not in `seen`, which it joins: each one before those that it leads to."""
    finished: list[str] = []
    open_: list[tuple[str, Iterator[str]]] = []
    if name not in seen:
        seen.add(name)
        open_.append((name, iter(edges[name])))
    while open_:
        here, rest = open_[-1]
        other = next((one for one in rest if one not in seen), None)
        if other is None:
            finished.append(here)
            open_.pop()
        else:
            seen.add(other)
            open_.append((other, iter(edges[other])))
    return finished[::-1]


def _with_names(schema: Any, renamed: Callable[[str, bool], str | None], is_inner: bool = False) -> Any:
    """Return a schema with other names in its references; false in place of one whose new name is None."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    reference = made.get("$ref")
    if isinstance(reference, str) and reference.startswith(_PREFIX):
        name = renamed(reference.removeprefix(_PREFIX), is_inner)
        if name is None:
            return False
        made["$ref"] = _PREFIX + name
    for word in made:
        below = is_inner or word not in _SAME_VALUE
        if word in ONE:
            made[word] = _with_names(made[word], renamed, below)
        elif word in MANY and isinstance(made[word], list):
            listed = [_with_names(one, renamed, below) for one in made[word]]
            made[word] = [one for one in listed if one is not False] if word == "anyOf" else listed
        elif word in NAMED and isinstance(made[word], dict):
            made[word] = {name: _with_names(one, renamed, below) for name, one in made[word].items()}
    return made


def _dead(definitions: dict[str, Any]) -> set[str]:
    """Return the definitions that no document satisfies, since what they ask for would be too deep."""
    dead: set[str] = set()
    while found := {name for name, one in definitions.items() if name not in dead and _is_dead(one, dead)}:
        dead |= found
    return dead


def _is_dead(schema: Any, dead: set[str]) -> bool:
    if not isinstance(schema, dict):
        return schema is False
    if str(schema.get("$ref", "")).removeprefix(_PREFIX) in dead:
        return True
    if any(_is_dead(one, dead) for one in schema.get("allOf", ())):
        return True
    if "anyOf" in schema and all(_is_dead(one, dead) for one in schema["anyOf"]):
        return True
    match schema.get("type"):
        case "object" | ["object"]:
            return _is_dead_object(schema, dead)
        case "array" | ["array"]:
            least, first = int(schema.get("minItems", 0)), schema.get("prefixItems", [])
            rest = [schema.get("items", True)] if least > len(first) else []
            return any(_is_dead(one, dead) for one in [*first[:least], *rest])
    return False


def _is_dead_object(schema: dict[str, Any], dead: set[str]) -> bool:
    named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if any(_is_dead(named.get(name, True), dead) for name in schema.get("required", ())):
        return True
    kinds = [others, *schema.get("patternProperties", {}).values()]
    possible = sum(not _is_dead(one, dead) for one in named.values())
    return bool(schema.get("minProperties", 0) > possible and all(_is_dead(one, dead) for one in kinds))
