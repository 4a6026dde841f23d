"""Texts outside JSON, as some formats of tool calls write them: Lark terminals of a schema's text and what ends it.

The router's grammars have a rule of any text for each, with its schema in a comment: `text_3: /(?s:.*)/ // %text {…}`.
Its member `x-end` is the text behind it, which the text itself never contains. Services from before these schemas read
the rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from penstock.generation.grammar.lookaheads import ANY, whole, without_lookaheads
from penstock.generation.grammar.schemas.refusal import Refusal
from penstock.generation.grammar.schemas.string_formats import NATIVE_PATTERNS, PATTERNS

END = "x-end"
_FORMATS = {**NATIVE_PATTERNS, **PATTERNS}
# Keywords that say more of a text than a terminal can.
_REFUSED = ("not", "if", "anyOf", "oneOf", "$ref")


def text_terminal(schema: dict[str, Any], bound: int, literal: Callable[[str], str]) -> str:
    """Return the terminal of a text that obeys `schema`, and of its end.

    `bound`: most characters of a text without `maxLength`; 0: any number. `literal` quotes a Lark string. Raises
    Refusal.
    """
    end = schema.get(END, "")
    if not isinstance(end, str):
        raise Refusal("#", END, "must be a text")
    parts = [*_conditions(schema, "#")]
    if bound and not any("maxLength" in one for one in (schema, *_all_of(schema))):
        parts.append(f"(?s:.{{0,{bound}}})")
    terms = [lark_regex(part, "#") for part in parts] or [f"/{ANY}/"]
    text = " & ".join(terms)
    if not end:
        return text
    # Readers end a text at its tag, whatever stands around that: it comes once, as the end.
    tag = re.escape(end.strip() or end)
    twice = lark_regex(f"{ANY}{tag}{ANY}{tag}{ANY}", "#")
    return f"(({text}) {literal(end)}) & ~{twice}"


def _all_of(schema: dict[str, Any]) -> list[dict[str, Any]]:
    parts = schema.get("allOf")
    return [one for one in parts if isinstance(one, dict)] if isinstance(parts, list) else []


def _conditions(schema: dict[str, Any], path: str) -> list[str]:
    """Return patterns of whole texts; all of them hold."""
    found = []
    for word in _REFUSED:
        if word in schema:
            raise Refusal(path, word, "is not supported for a text that is not written as JSON")
    least, most = (_count(schema, word, path) for word in ("minLength", "maxLength"))
    if least or most is not None:
        found.append(f"(?s:.{{{least or 0},{'' if most is None else most}}})")
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        found += map(whole, without_lookaheads(pattern) or [pattern])
    name = schema.get("format")
    if isinstance(name, str) and name in _FORMATS:
        found.append(f"(?:{_FORMATS[name]})")
    for number, part in enumerate(_all_of(schema)):
        found += _conditions(part, f"{path}/allOf/{number}")
    return found


def _count(schema: dict[str, Any], word: str, path: str) -> int | None:
    value = schema.get(word)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise Refusal(path, word, "must be a whole number of 0 or more")
    return int(value)


def lark_regex(pattern: str, path: str) -> str:
    """Return a pattern as a terminal of Lark, on one line. Raises Refusal."""
    made, at = [], 0
    while at < len(pattern):
        one = pattern[at]
        if one == "\\":
            at += 1
            if at == len(pattern):
                raise Refusal(path, "pattern", "is not a regular expression")
            one = pattern[at]
            made.append(f"\\x{{{ord(one):x}}}" if one < " " else f"\\{one}")
        elif one == "/":
            made.append("\\/")
        elif one < " " or "\x7f" <= one <= "\x9f":
            made.append(f"\\x{{{ord(one):x}}}")
        else:
            made.append(one)
        at += 1
    return f"/{''.join(made)}/"
