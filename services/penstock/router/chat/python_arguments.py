"""Grammar of the arguments of calls that are written as Python, name(key=value, …), by JSON Schemas.

Texts stand in quotes of either kind, and True, False and None beside JSON's words for them: models write all of these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from typing_extensions import override

from penstock.router.chat.argument_grammar import ArgumentGrammar
from penstock.router.chat.call_block import PYTHON_NAME
from penstock.router.chat.python_values import KEY

# Characters between quotes: escapes that Python and JSON have in common, and no surrogate.
_ESCAPES = r"\\[\\\x22'nrtbf]|\\u([0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"
_SINGLE = rf"/'([^'\\\x00-\x1f\x7f]|{_ESCAPES})*'/"
_DOUBLE = rf'/"([^"\\\x00-\x1f\x7f]|{_ESCAPES})*"/'
_WORDS: Mapping[object, tuple[str, str]] = {True: ("True", "true"), False: ("False", "false"), None: ("None", "null")}


def takes_python(name: str, schema: Mapping[str, Any]) -> bool:
    """Return True where a tool of that name, with parameters of that schema, can be called in this syntax."""
    properties = schema.get("properties")
    keys = properties if isinstance(properties, Mapping) else ()
    return PYTHON_NAME.fullmatch(name) is not None and all(KEY.fullmatch(str(key)) for key in keys)


class PythonArguments(ArgumentGrammar):
    """Maker of the terms between the parentheses of a call, the closing one included."""

    prefix = "python"

    @override
    def free(self, tool: str) -> str:
        parts, comma = self._parts, self._comma()
        quoted = self._parts.json_value({"type": ["number", "string"]}, tool)
        words = self._words(_WORDS)
        end, listed = parts.text(")"), f"{parts.text('[')} (python_value ({comma} python_value)*)? {parts.text(']')}"
        items = f"{parts.text('{')} (python_item ({comma} python_item)*)? {parts.text('}')}"
        parts.rule("python_member", f"/{KEY.pattern}/ {parts.text('=')} python_value")
        parts.rule("python_item", f"({_DOUBLE} | {_SINGLE}) {self._colon()} python_value")
        parts.rule("python_value", f"{quoted} | {_SINGLE} | {words} | {listed} | {items}")
        return f"(python_member ({comma} python_member)*)? {end}"

    @override
    def _ordered(self, properties: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        return properties.items()

    @override
    def _key(self, key: str, depth: int) -> str:
        return f"({self._quoted(key)}) {self._colon()}" if depth else self._parts.text(f"{key}=")

    @override
    def _close(self, depth: int) -> str:
        return self._parts.text("}" if depth else ")")

    @override
    def _comma(self) -> str:
        return f"{self._parts.text(',')} ({self._parts.text(' ')})?"

    @override
    def _text(self, listed: list[Any] | None, held: Mapping[str, Any], origin: str) -> str:
        if listed is not None:
            return f"({' | '.join(self._quoted(str(value)) for value in listed)})"
        # Words of a schema hold for JSON's texts alone.
        in_json = self._parts.json_value({"type": "string", **held}, origin)
        return in_json if held else f"({in_json} | {_SINGLE})"

    @override
    def _plain(self, kind: str, words: Mapping[str, Any], root: Mapping[str, Any], origin: str) -> str:
        if kind == "null":
            return self._words((None,))
        if kind == "boolean" and not {"enum", "const", "not", "allOf"} & words.keys():
            return self._words((True, False))
        return self._json(words, root, origin)

    def _colon(self) -> str:
        return f"{self._parts.text(':')} ({self._parts.text(' ')})?"

    def _words(self, values: Iterable[object]) -> str:
        return f"({' | '.join(self._parts.text(word) for value in values for word in _WORDS[value])})"

    def _quoted(self, text: str) -> str:
        """Terms of a text in double quotes, or in single ones where it has nothing to escape."""
        double = json.dumps(text, ensure_ascii=False)
        is_plain = double[1:-1] == text and "'" not in text
        return " | ".join(map(self._parts.text, [double, *([f"'{text}'"] if is_plain else [])]))
