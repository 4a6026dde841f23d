"""Translation of a constraint into Lark text for llguidance. Runs on untrusted text, in the trial process only.

Every text ends with `no_forcing`. Without it llguidance allows only the canonical spelling of text that the grammar
dictates, and a draw would not be from the model's own distribution over the allowed tokens.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from penstock.generation.grammar.finite import has_finite_document
from penstock.generation.grammar.grammar_limits import JsonBounds
from penstock.generation.grammar.lookaheads import beginning, take_lookaheads, whole
from penstock.generation.grammar.plain_texts import lark_regex, text_terminal
from penstock.generation.grammar.regex_parts import ends_at_end
from penstock.generation.grammar.schemas.document import read_json, read_json_at, write_json
from penstock.generation.grammar.schemas.refusal import Refusal
from penstock.generation.grammar.schemas.refused_part import ORIGIN
from penstock.generation.grammar.schemas.settings import NAME, take_settings
from penstock.generation.grammar.schemas.simplify import simplify
from penstock.generation.grammar.spec import ConstraintKind

OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_BOUNDS = JsonBounds()
# Room for a tool's name in a message.
_MAX_LABEL = 80
# A schema in Lark text.
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
# The rule of a text outside JSON, on a line of its own; no quoted text has a line break.
_PLAIN_TEXT = re.compile(r"^text_([0-9]+)(?:\[suffix=[^\n]*\])?: /\(\?s:\.\*\)/ // %text (?=\{)", re.MULTILINE)
_CONTROL = re.compile("[\x7f-\x9f]")


class Untranslatable(Exception):
    """Error for invalid text. The message is for the caller and contains no part of the text."""


def to_lark(kind: ConstraintKind, text: str, choices: tuple[str, ...], bounds: JsonBounds = _BOUNDS) -> str:
    """Return the Lark text of a constraint. Raises Untranslatable."""
    match kind:
        case ConstraintKind.JSON_SCHEMA:
            return _json_schema(text, bounds) + OPTIONS
        case ConstraintKind.JSON_OBJECT:
            return _json_schema('{"type": "object"}', bounds) + OPTIONS
        case ConstraintKind.REGEX:
            return _regex(text) + OPTIONS
        case ConstraintKind.CHOICE:
            # One terminal: its automaton tells a choice from another one that it is a prefix of.
            return "start: CHOICE\nCHOICE: " + " | ".join(_literal(choice) for choice in choices) + OPTIONS
        case ConstraintKind.GRAMMAR:
            return _grammar(text, bounds) + OPTIONS


def _regex(text: str) -> str:
    taken = take_lookaheads(f"^{text.removeprefix('^')}")
    if taken is None:
        lark: str = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
        return lark
    # The whole output matches: a `$` at its end says nothing more.
    rest = taken.rest if ends_at_end(taken.rest) else f"{taken.rest}$"
    try:
        terms = [lark_regex(one, "#") for one in (whole(rest), *map(beginning, taken.asked))]
        terms += [f"~{lark_regex(beginning(one), '#')}" for one in taken.forbidden]
    except Refusal:
        raise Untranslatable("is not a regular expression") from None
    return f"start: TEXT\nTEXT: {' & '.join(terms)}"


def _json_schema(text: str, bounds: JsonBounds) -> str:
    """Check that `text` is one JSON object, so that no part of it can be Lark, and write it in llguidance's form."""
    try:
        schema: Any = read_json(text)
    except (ValueError, RecursionError):
        raise Untranslatable("must be a JSON document") from None
    if not isinstance(schema, dict):
        raise Untranslatable("must be a JSON object")
    return f"start: %json {_simple(schema, bounds)}"


def _simple(schema: dict[str, Any], bounds: JsonBounds) -> str:
    """Return the JSON text of a simplified schema. Raises Untranslatable."""
    try:
        settings = take_settings(schema, bounds)
        try:
            made = simplify(
                schema,
                is_strict=settings.is_strict,
                bounds=settings.bounds,
                takes_any_of=settings.guidance.get("coerce_one_of") is True,
            )
        except Refusal:
            if not settings.guidance.get("lenient"):
                raise
            # llguidance leaves out what it does not know: that was asked for.
            made = schema
        if not has_finite_document(made):
            raise Untranslatable("has no document that ends: it requires itself")
        return write_json({NAME: settings.for_llguidance, **made})
    except Refusal as error:
        raise Untranslatable(str(error)) from None
    except RecursionError:
        raise Untranslatable("is nested too deeply") from None


def _literal(text: str) -> str:
    """Quote a Lark string: as in JSON, but with escapes for control characters that only JSON takes as they are."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def _grammar(text: str, bounds: JsonBounds) -> str:
    try:
        lark = any_to_lark(text)
    except Exception:  # the converter's own kind of error, which quotes the text, and any other that odd text causes
        raise Untranslatable("is neither Lark (no `start:` rule) nor GBNF") from None
    return _with_simple_schemas(_with_plain_texts(lark, bounds), bounds)


def _with_simple_schemas(lark: str, bounds: JsonBounds) -> str:
    """Return Lark text with simplified schemas. Raises Untranslatable."""
    made, end = [], 0
    while (found := _EMBEDDED.search(lark, end)) is not None:
        made.append(lark[end : found.end()])
        try:
            schema, end = read_json_at(lark, found.end())
        except (ValueError, RecursionError):  # llguidance says where
            end = found.end()
            continue
        made.append(_of_tool(schema, bounds))
    return "".join(made) + lark[end:]


def _with_plain_texts(lark: str, bounds: JsonBounds) -> str:
    """Return Lark text with terminals in place of schemas of plain texts. Raises Untranslatable."""
    made, end = [], 0
    while (found := _PLAIN_TEXT.search(lark, end)) is not None:
        made += [lark[end : found.start()], f"text_{found[1]}: TEXT_{found[1]}\nTEXT_{found[1]}: "]
        try:
            schema, end = read_json_at(lark, found.end())
        except (ValueError, RecursionError):
            raise Untranslatable("has a text without a schema") from None
        try:
            made.append(text_terminal(schema, bounds.max_json_characters, _literal))
        except Refusal as error:
            raise Untranslatable(f"{tool_of(schema)}{error}") from None
    return "".join(made) + lark[end:]


def _of_tool(schema: dict[str, Any], bounds: JsonBounds) -> str:
    """Return a simplified schema of a grammar. Raises Untranslatable that names the tool with these parameters."""
    label = tool_of(schema)
    try:
        text = _simple(schema, bounds)
    except Untranslatable as error:
        raise Untranslatable(f"{label}{error}") from None
    return f"{{{json.dumps(ORIGIN)}: {json.dumps(schema[ORIGIN])}, {text[1:]}" if label else text


def tool_of(schema: dict[str, Any]) -> str:
    """Return the words for errors about a schema that names its tool, as the router's schemas do; else none."""
    origin = schema.get(ORIGIN)
    return (
        f"{origin[:_MAX_LABEL]}, "
        if isinstance(origin, str) and origin.startswith("tool ") and origin.isprintable()
        else ""
    )


def schemas_of(lark: str) -> list[dict[str, Any]]:
    """Return the simplified schemas in Lark text."""
    found = []
    for place in _EMBEDDED.finditer(lark):
        with contextlib.suppress(ValueError, RecursionError):
            found.append(read_json_at(lark, place.end())[0])
    return found
