"""Grammar of a call's arguments in a spelling other than JSON, by JSON Schemas: objects, lists, texts, other values.

What a schema says of numbers, and what a spelling has no grammar for, is a rule of JSON: the parsers read both.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.router.chat.parameter_schema import alternatives, is_text_schema, resolved

# Words that change nothing about what a value may be.
_REMARKS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"))
_DEFINITIONS = frozenset(("$defs", "definitions"))
_OF_OBJECT = frozenset(("type", "properties", "required", "additionalProperties")) | _REMARKS | _DEFINITIONS
_OF_LIST = frozenset(("type", "items", "minItems", "maxItems")) | _REMARKS | _DEFINITIONS
_OF_TEXT = ("pattern", "minLength", "maxLength", "format", "allOf", "not", "if")
# Objects and lists of a schema within one another, and rules in all: a schema that refers to itself goes on as JSON.
_MOST_DEPTH, _MOST_RULES = 8, 1024
_MOST_ITEMS = 1024


@dataclass(frozen=True)
class GrammarParts:
    """Makers of the parts of a grammar."""

    # Terms of a fixed text.
    text: Callable[[str], str]
    # Rule of a value in JSON by its schema; an error names its origin.
    json_value: Callable[[Mapping[str, Any], str], str]
    # Terms of a text by words of its schema, up to and including what closes it.
    text_value: Callable[[Mapping[str, Any], str, str], str]
    # Adds a rule under a name.
    rule: Callable[[str, str], None]


class ArgumentGrammar(ABC):
    """Maker of the terms of arguments, from behind the bracket that opens them, the closing one included."""

    # First part of its rules' names.
    prefix: ClassVar[str]

    def __init__(self, parts: GrammarParts) -> None:
        """Make it; `parts` add rules to one grammar."""
        self._parts = parts
        self._made = 0

    def of(self, schema: Mapping[str, Any], tool: str) -> str:
        """Return the terms of parameters that obey a schema."""
        return self._members(schema, schema, tool, 0)

    @abstractmethod
    def free(self, tool: str) -> str:
        """Return the terms of parameters with any names and values."""

    @abstractmethod
    def _ordered(self, properties: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        """Return keys with their schemas in the order in which models write them."""

    @abstractmethod
    def _key(self, key: str, depth: int) -> str:
        """Terms of a key, and of what stands before its value; `depth`: 0 for a parameter of the call."""

    @abstractmethod
    def _close(self, depth: int) -> str:
        """Terms of the bracket that ends the arguments, or an object within them."""

    @abstractmethod
    def _comma(self) -> str:
        """Terms between two members, or two values of a list."""

    @abstractmethod
    def _text(self, listed: list[Any] | None, held: Mapping[str, Any], origin: str) -> str:
        """Terms of a text: one of `listed`, else one that obeys the words `held`."""

    @abstractmethod
    def _plain(self, kind: str, words: Mapping[str, Any], root: Mapping[str, Any], origin: str) -> str:
        """Terms of a number, a truth value or null."""

    def _members(self, schema: Mapping[str, Any], root: Mapping[str, Any], tool: str, depth: int) -> str:
        """Terms of members in their order, and the bracket that closes them."""
        properties, required = schema.get("properties"), schema.get("required")
        needed = required if isinstance(required, list) else []
        rows = self._ordered(properties) if isinstance(properties, Mapping) else ()
        made = [(self._member(str(key), one, root, tool, depth), key in needed) for key, one in rows]
        # From the last on: what may follow a member, and what may follow where none came yet.
        after = begin = self._close(depth)
        for member, is_needed in reversed(made):
            following = self._named(after)
            first = f"{member} {following}"
            begin = first if is_needed else f"({first} | {begin})"
            after = f"{self._comma()} {first}" if is_needed else f"({self._comma()} {first} | {following})"
        return begin

    def _member(self, key: str, schema: Any, root: Mapping[str, Any], tool: str, depth: int) -> str:
        value = self._value(schema if isinstance(schema, Mapping) else {}, root, f"{tool}, parameter {key}", depth)
        return f"{self._key(key, depth)} {value}"

    def _value(self, schema: Mapping[str, Any], root: Mapping[str, Any], origin: str, depth: int) -> str:
        found = [self._one(option, root, origin, depth) for option in alternatives(schema, root)]
        if None in found:
            # As a whole: what has no spelling of its own may be any of the alternatives.
            return self._json(schema, root, origin)
        terms = [one for one in found if one is not None]
        rule = terms[0] if len(terms) == 1 else f"({' | '.join(terms)})"
        return self._named(rule)

    def _named(self, terms: str) -> str:
        """Make a rule of terms; return its name."""
        self._made += 1
        name = f"{self.prefix}_{self._made}"
        self._parts.rule(name, terms)
        return name

    def _one(self, schema: Mapping[str, Any], root: Mapping[str, Any], origin: str, depth: int) -> str | None:
        """Terms of a value of one type; None where it has no spelling of its own."""
        words, kind = resolved(schema, root), schema.get("type")
        if is_text_schema(words):
            listed = words["enum"] if isinstance(words.get("enum"), list) else None
            if listed is None and "const" in words:
                listed = [words["const"]]
            return self._text(listed, {word: words[word] for word in _OF_TEXT if word in words}, origin)
        if kind in ("number", "integer", "boolean", "null"):
            return self._plain(kind, words, root, origin)
        if depth >= _MOST_DEPTH or self._made >= _MOST_RULES:
            return None
        if kind == "object" and words.keys() <= _OF_OBJECT and words.get("additionalProperties") in (None, False):
            if not isinstance(words.get("properties"), Mapping):
                return None
            return f"{self._parts.text('{')} {self._members(words, root, origin, depth + 1)}"
        if kind == "array" and words.keys() <= _OF_LIST and isinstance(words.get("items"), Mapping):
            return self._list(words, root, origin, depth)
        return None

    def _list(self, words: Mapping[str, Any], root: Mapping[str, Any], origin: str, depth: int) -> str | None:
        least, most = words.get("minItems", 0), words.get("maxItems")
        if not isinstance(least, int) or not (most is None or isinstance(most, int)) or least > _MOST_ITEMS:
            return None
        text, item = self._parts.text, self._value(words["items"], root, origin, depth + 1)
        if most is not None and most < max(1, least):
            return f"{text('[')} {text(']')}" if most == 0 >= least else None
        times = f"{{{max(0, least - 1)},{'' if most is None else min(most, _MOST_ITEMS) - 1}}}"
        times = "*" if times == "{0,}" else times
        items = f"{item} ({self._comma()} {item}){times}"
        return f"{text('[')} {items if least else f'({items})?'} {text(']')}"

    def _json(self, schema: Mapping[str, Any], root: Mapping[str, Any], origin: str) -> str:
        shared = {name: root[name] for name in _DEFINITIONS if name in root}
        return self._parts.json_value(json.loads(json.dumps({**shared, **schema})), origin)
