"""Schema of one parameter of a tool, for formats that write values as plain text: references, types, alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# References that lead from one to the next.
_MOST_STEPS = 16


def resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with the words of the definition that it refers to; `root` has the definitions."""
    words: dict[str, Any] = dict(schema) if isinstance(schema, Mapping) else {}
    for _ in range(_MOST_STEPS):
        name = words.get("$ref")
        if not isinstance(name, str) or not name.startswith("#/"):
            break
        target: object = root
        for step in name[2:].split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            break
        del words["$ref"]
        words = {**target, **words}
    return words


def alternatives(schema: object, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Make the schemas of a value, which has one of them; each has one type at most."""
    pending = [(schema, 0)]
    while pending:
        one, depth = pending.pop(0)
        words = resolved(one, root)
        parts = next((words[word] for word in ("anyOf", "oneOf") if isinstance(words.get(word), list)), None)
        if parts is not None and depth < _MOST_STEPS:
            others = {word: value for word, value in words.items() if word not in ("anyOf", "oneOf")}
            pending[:0] = [({**others, **part}, depth + 1) for part in parts if isinstance(part, Mapping)]
        elif isinstance(words.get("type"), list):
            yield from ({**words, "type": kind} for kind in words["type"])
        else:
            yield words


def is_text_schema(schema: Mapping[str, Any]) -> bool:
    """Return True where each value is a text."""
    if "type" in schema:
        return bool(schema["type"] == "string")
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return bool(values) and all(isinstance(value, str) for value in values)
