"""Grammar of the arguments of Gemma 4's tool calls: its own spelling of objects, lists and texts, by JSON Schemas.

What a schema says of numbers, and what this spelling has no grammar for, is a rule of JSON: the parser reads both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.router.chat.gemma_calls import GEMMA_QUOTE
from penstock.router.chat.parameter_schema import alternatives, is_text_schema, resolved

# Words that change nothing about what a value may be.
_REMARKS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"))
_DEFINITIONS = frozenset(("$defs", "definitions"))
_OF_OBJECT = frozenset(("type", "properties", "required", "additionalProperties")) | _REMARKS | _DEFINITIONS
_OF_LIST = frozenset(("type", "items", "minItems", "maxItems")) | _REMARKS | _DEFINITIONS
_OF_TEXT = ("pattern", "minLength", "maxLength", "format", "allOf", "not", "if")
_PLAIN_KEY = re.compile(r"[\w.$ -]+")
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


class GemmaArguments:
    """Maker of the terms between the braces of a call, the closing one included."""

    def __init__(self, parts: GrammarParts) -> None:
        """Make it; `parts` add rules to one grammar."""
        self._parts = parts
        self._made = 0

    def of(self, schema: Mapping[str, Any], tool: str) -> str:
        """Return the terms of parameters that obey a schema."""
        return self._members(schema, schema, tool, 0)

    def free(self, tool: str) -> str:
        """Return the terms of parameters with any names and values."""
        parts = self._parts
        number = parts.json_value({"type": ["number", "boolean", "null"]}, tool)
        text = f"{parts.text(GEMMA_QUOTE)} {parts.text_value({}, GEMMA_QUOTE, tool)}"
        key = '/[^{}\\[\\],:<>"\\n ][^{}\\[\\],:<>"\\n]{0,127}/'
        comma, begin, end = (parts.text(one) for one in (",", "{", "}"))
        members = f"(gemma_member ({comma} gemma_member)*)? {end}"
        listed = f"{parts.text('[')} (gemma_value ({comma} gemma_value)*)? {parts.text(']')}"
        parts.rule("gemma_member", f"{key} {parts.text(':')} gemma_value")
        parts.rule("gemma_value", f"{text} | {number} | {begin} {members} | {listed}")
        return members

    def _members(self, schema: Mapping[str, Any], root: Mapping[str, Any], tool: str, depth: int) -> str:
        """Terms of members in the order of the schema, and the closing brace."""
        text = self._parts.text
        properties, required = schema.get("properties"), schema.get("required")
        needed = required if isinstance(required, list) else []
        # The template sorts keys, so the model does.
        rows = sorted(properties.items(), key=lambda row: row[0].lower()) if isinstance(properties, Mapping) else ()
        made = [(self._member(str(key), one, root, tool, depth), key in needed) for key, one in rows]
        # From the last on: what may follow a member, and what may follow where none came yet.
        after = begin = text("}")
        for member, is_needed in reversed(made):
            following = self._named(after)
            first = f"{member} {following}"
            begin = first if is_needed else f"({first} | {begin})"
            after = f"{text(',')} {first}" if is_needed else f"({text(',')} {first} | {following})"
        return begin

    def _member(self, key: str, schema: Any, root: Mapping[str, Any], tool: str, depth: int) -> str:
        written = key if _PLAIN_KEY.fullmatch(key) else f"{GEMMA_QUOTE}{key}{GEMMA_QUOTE}"
        value = self._value(schema if isinstance(schema, Mapping) else {}, root, f"{tool}, parameter {key}", depth)
        return f"{self._parts.text(written + ':')} {value}"

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
        name = f"gemma_{self._made}"
        self._parts.rule(name, terms)
        return name

    def _one(self, schema: Mapping[str, Any], root: Mapping[str, Any], origin: str, depth: int) -> str | None:
        """Terms of a value of one type; None where it has no spelling of its own."""
        words, kind = resolved(schema, root), schema.get("type")
        if is_text_schema(words):
            return self._text(words, origin)
        if kind in ("number", "integer", "boolean", "null"):
            return self._json(words, root, origin)
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
        items = f"{item} ({text(',')} {item}){times}"
        return f"{text('[')} {items if least else f'({items})?'} {text(']')}"

    def _text(self, words: Mapping[str, Any], origin: str) -> str:
        parts, quote = self._parts, self._parts.text(GEMMA_QUOTE)
        listed = words["enum"] if isinstance(words.get("enum"), list) else None
        if listed is None and "const" in words:
            listed = [words["const"]]
        if listed is not None:
            return f"{quote} ({' | '.join(parts.text(str(value)) for value in listed)}) {quote}"
        held = {word: words[word] for word in _OF_TEXT if word in words}
        return f"{quote} {parts.text_value(held, GEMMA_QUOTE, origin)}"

    def _json(self, schema: Mapping[str, Any], root: Mapping[str, Any], origin: str) -> str:
        shared = {name: root[name] for name in _DEFINITIONS if name in root}
        return self._parts.json_value(json.loads(json.dumps({**shared, **schema})), origin)
