"""A bound for a schema that refers to itself: a copy of its definitions for every level, and nothing below the last.

llguidance follows a reference for ever, and a model that has begun to nest goes on until the request's last token. As
with other bounds, every document satisfies the schema, but some documents that satisfy it are never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.generation.grammar.schemas.document import write_json
from penstock.generation.grammar.schemas.words import MANY, NAMED, ONE, parts

_PREFIX = "#/$defs/"
# Most copies of definitions that refer to themselves, and most bytes of the schema with them: beyond that llguidance
# takes seconds, and soon runs out of numbers for its symbols.
_MOST_COPIES = 512
_MOST_BYTES = 192 << 10
_NONE: Mapping[str, int] = {}


def bound_recursion(schema: dict[str, Any], depth: int, depths: Mapping[str, int] = _NONE) -> dict[str, Any]:
    """Return a simple schema in which a definition holds itself at most `depth` times; 0: any number of times.

    Definitions that refer to each other are counted together: each time that one is within itself. Two kinds keep no
    bound: definitions with deeper documents only, and the largest ones if the copies of all would be too many.
    `depths`: other depths of some definitions. Raises RecursionError for a schema nested too deeply.
    """
    definitions: dict[str, Any] = schema.get("$defs", {})
    if not depth or not definitions:
        return schema
    root = {word: value for word, value in schema.items() if word != "$defs"}
    groups = _groups(
        {name: [other for other in _names(one) if other in definitions] for name, one in definitions.items()},
        [name for name in _names(root) if name in definitions],
    )
    copies = _copies(schema, [(group, max(depths.get(name, depth) for name in group)) for group in groups])
    if not copies:
        return schema
    bounded = {name for one in copies for name in one.group}

    def first(name: str) -> str:
        return _copy_name(name, 0) if name in bounded else name

    made = {name: _with_names(one, first) for name, one in definitions.items() if name not in bounded}
    for one in copies:
        made |= {name: _with_names(copy, first) for name, copy in one.made.items()}
    return {**_with_names(root, first), "$defs": made}


@dataclass(frozen=True)
class _Copies:
    """Definitions of one group, once for every level, without parts that would be too deep."""

    group: list[str]
    made: dict[str, Any]


def _copies(schema: dict[str, Any], groups: list[tuple[list[str], int]]) -> list[_Copies]:
    """Make copies of the groups that can have them, each of a depth, the smallest first."""
    definitions = schema["$defs"]
    sizes = {name: len(write_json(definitions[name])) for group, _ in groups for name in group}
    left_bytes = _MOST_BYTES - len(write_json(schema)) if groups else 0
    left_copies, found = _MOST_COPIES, []
    for group, depth in sorted(groups, key=lambda each: sum(sizes[name] for name in each[0])):
        count, size = len(group) * (depth + 1), sum(sizes[name] for name in group) * depth
        if count > left_copies or size > left_bytes:
            continue
        made = _levels({name: definitions[name] for name in group}, depth)
        if made is not None:
            found.append(_Copies(group, made))
            left_copies, left_bytes = left_copies - count, left_bytes - size
    return found


def _levels(group: dict[str, Any], depth: int) -> dict[str, Any] | None:
    """Return the definitions of a group once for every level; None if one has only deeper documents.

    A reference back to an earlier definition of the group leads to the next level: every circle has such a reference,
    and most have exactly one.
    """
    place = {name: at for at, name in enumerate(group)}

    def ending_at(name: str, level: int) -> Callable[[str], str | None]:
        def renamed(other: str) -> str | None:
            if other not in place:
                return other
            below = level + (place[other] <= place[name])
            return _copy_name(other, below) if below <= depth else None

        return renamed

    copies = {
        _copy_name(name, level): _with_names(one, ending_at(name, level))
        for level in reversed(range(depth + 1))
        for name, one in group.items()
    }
    dead = _dead(copies)
    if any(_copy_name(name, 0) in dead for name in group):
        return None
    return {
        name: _with_names(one, lambda other: None if other in dead else other)
        for name, one in copies.items()
        if name not in dead
    }


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


def _groups(edges: dict[str, list[str]], first: list[str]) -> list[list[str]]:
    """Return the definitions that lead to themselves, in groups that lead to each other (Kosaraju).

    Each group begins with the definition that is reached first from `first`; each other one follows a definition that
    leads to it.
    """
    backward: dict[str, list[str]] = {name: [] for name in edges}
    for name, others in edges.items():
        for other in others:
            backward[other].append(name)
    order: list[str] = []
    seen: set[str] = set()
    for name in (*first, *edges):
        order += _last_first(name, edges, seen)[::-1]
    order.reverse()
    place = {name: at for at, name in enumerate(order)}
    found = []
    seen = set()
    for name in order:
        group = _last_first(name, backward, seen)
        if len(group) > 1 or name in edges[name]:
            found.append(sorted(group, key=place.__getitem__))
    return found


def _last_first(name: str, edges: dict[str, list[str]], seen: set[str]) -> list[str]:
    """Return the names reached from a name and not in `seen`, and add them there: each before those it leads to."""
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


def _with_names(schema: Any, renamed: Callable[[str], str | None]) -> Any:
    """Return a schema with other names in its references; false in place of a reference with the new name None."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    reference = made.get("$ref")
    if isinstance(reference, str) and reference.startswith(_PREFIX):
        name = renamed(reference.removeprefix(_PREFIX))
        if name is None:
            return False
        made["$ref"] = _PREFIX + name
    for word in made:
        if word in ONE:
            made[word] = _with_names(made[word], renamed)
        elif word in MANY and isinstance(made[word], list):
            listed = [_with_names(one, renamed) for one in made[word]]
            made[word] = [one for one in listed if one is not False] if word == "anyOf" else listed
        elif word in NAMED and isinstance(made[word], dict):
            made[word] = {name: _with_names(one, renamed) for name, one in made[word].items()}
    return made


def _dead(definitions: dict[str, Any]) -> set[str]:
    """Return the definitions that no document satisfies, since their documents would be too deep."""
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
