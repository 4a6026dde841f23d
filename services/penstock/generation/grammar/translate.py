"""Translation of a constraint into Lark text for llguidance. Runs on untrusted text, in the trial process only.

Every text ends with `no_forcing`. Without it llguidance allows only the canonical spelling of text that the grammar
leaves no choice about, and a draw would not be from the model's own distribution over the allowed tokens.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from penstock.generation.grammar.finite import has_finite_document
from penstock.generation.grammar.spec import ConstraintKind

OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# JSON allows any amount of white space, and some models go on with it for ever. This is what documents are written
# with: up to two blanks in a line, or a line break, perhaps with an empty line, and deep indentation. A schema may
# override it by its own "x-guidance".
WHITESPACE = r"[\x20\x09]{1,2}|(\x0D?\x0A){1,2}[\x20\x09]{0,32}"
_GUIDANCE = "x-guidance"
_CONTROL = re.compile("[\x7f-\x9f]")


class Untranslatable(Exception):
    """Text that is not of its kind. The message is for the caller and holds no part of the text."""


def to_lark(kind: ConstraintKind, text: str, choices: tuple[str, ...]) -> str:
    """Return the Lark text of a constraint. Raises Untranslatable."""
    match kind:
        case ConstraintKind.JSON_SCHEMA:
            return _json_schema(text) + OPTIONS
        case ConstraintKind.JSON_OBJECT:
            return _json_schema('{"type": "object"}') + OPTIONS
        case ConstraintKind.REGEX:
            lark: str = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
            return lark + OPTIONS
        case ConstraintKind.CHOICE:
            # One terminal: its automaton tells a choice from another one that it is a prefix of.
            return "start: CHOICE\nCHOICE: " + " | ".join(_literal(choice) for choice in choices) + OPTIONS
        case ConstraintKind.GRAMMAR:
            return _grammar(text) + OPTIONS


def _json_schema(text: str) -> str:
    """Check that `text` is one JSON object, so that no part of it can be Lark, and wrap it."""
    try:
        schema: Any = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Untranslatable("must be a JSON document") from None
    if not isinstance(schema, dict):
        raise Untranslatable("must be a JSON object")
    if not _ends(schema):
        raise Untranslatable("has no document that ends: it requires itself")
    if _GUIDANCE not in schema:
        # Inserted as text: numbers stay as they are written, and the order of properties matters.
        settings = json.dumps({"whitespace_pattern": WHITESPACE})
        rest = text.lstrip()[1:]
        text = f'{{"{_GUIDANCE}": {settings}{", " if schema else ""}{rest}'
    return f"start: %json {text}"


def _ends(schema: dict[str, Any]) -> bool:
    try:
        return has_finite_document(schema)
    except RecursionError:  # llguidance refuses a schema that is nested so deeply
        return True


def _refuse_constant(_: str) -> None:
    raise ValueError("not JSON")


def _literal(text: str) -> str:
    """Quote a Lark string: as in JSON, but with escapes for control characters that only JSON takes as they are."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def _grammar(text: str) -> str:
    try:
        return any_to_lark(text)
    except Exception:  # the converter's own kind of error, which quotes the text, and any other that odd text causes
        raise Untranslatable("is neither Lark (no `start:` rule) nor GBNF") from None
