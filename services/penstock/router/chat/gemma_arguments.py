"""Grammar of the arguments of Gemma 4's tool calls: its own spelling of objects, lists and texts, by JSON Schemas."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from typing_extensions import override

from penstock.router.chat.argument_grammar import ArgumentGrammar
from penstock.router.chat.gemma_calls import GEMMA_QUOTE

_PLAIN_KEY = re.compile(r"[\w.$ -]+")


class GemmaArguments(ArgumentGrammar):
    """Maker of the terms between the braces of a call, the closing one included."""

    prefix = "gemma"

    @override
    def free(self, tool: str) -> str:
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

    @override
    def _ordered(self, properties: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        # The template sorts keys, so the model does.
        return sorted(properties.items(), key=lambda row: row[0].lower())

    @override
    def _key(self, key: str, depth: int) -> str:
        written = key if _PLAIN_KEY.fullmatch(key) else f"{GEMMA_QUOTE}{key}{GEMMA_QUOTE}"
        return self._parts.text(f"{written}:")

    @override
    def _close(self, depth: int) -> str:
        return self._parts.text("}")

    @override
    def _comma(self) -> str:
        return self._parts.text(",")

    @override
    def _text(self, listed: list[Any] | None, held: Mapping[str, Any], origin: str) -> str:
        parts, quote = self._parts, self._parts.text(GEMMA_QUOTE)
        if listed is not None:
            return f"{quote} ({' | '.join(parts.text(str(value)) for value in listed)}) {quote}"
        return f"{quote} {parts.text_value(held, GEMMA_QUOTE, origin)}"

    @override
    def _plain(self, kind: str, words: Mapping[str, Any], root: Mapping[str, Any], origin: str) -> str:
        return self._json(words, root, origin)
