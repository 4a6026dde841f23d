"""Construction of llguidance's matchers, with the limits of each of their steps. No other module makes one."""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher, LLParserLimits

from penstock.generation.grammar.grammar_tokenizer import GrammarTokenizer

# llguidance's defaults, except a lexer of 100 MB instead of 500, and messages without the grammar in them. They bound
# the cost of a mask or a token while a request runs. The fuel of a lexer's first state is a cost of compiling: fifty
# models of twenty bounded numbers take more than a million. Costs of compiling that they do not bound, the trial
# process does. A row has four items for each key that may be left out: the masks of 1500 such keys take up to 90 ms.
LIMITS = LLParserLimits(
    max_items_in_row=6_000, max_lexer_states=50_000, initial_lexer_fuel=20_000_000, verbose_errors=False
)
_LIMITED = ("ParserTooComplex", "LexerTooComplex")
# llguidance has no stop reason of its own for each of its limits.
_FULL_ROW = "Current row has"
_TOO_COMPLEX = ("too large", "too many", "too complex", "too big", "fuel", "too deep", _FULL_ROW)
_MAX_MESSAGE = 200
_QUOTED = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|`[^`]*`|/(?:[^/\\\n]|\\.)*/|@\S+)""")
# Numbers of less than four digits are places, mostly.
_WORD = re.compile(r"\d{4,}|(?!\d)\w{2,}")
# Words of JSON Schema, and those that messages are made of: they say nothing about who wrote them.
_KEYWORDS = frozenset(
    (
        "additionalProperties", "allOf", "an", "anyOf", "array", "at", "be", "boolean", "by", "cannot", "const",
        "contains", "definitions", "dependentRequired", "dependentSchemas", "does", "else", "enum", "error",
        "exclusiveMaximum", "exclusiveMinimum", "exist", "expected", "failed", "format", "found", "grammar", "greater",
        "group", "if", "in", "integer", "invalid", "is", "items", "keys", "large", "less", "lexer", "many", "maxItems",
        "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf",
        "must", "name", "not", "null", "number", "object", "of", "oneOf", "or", "parse", "pattern", "patternProperties",
        "prefixItems", "properties", "property", "propertyNames", "range", "regex", "repetition", "required", "rule",
        "schema", "start", "string", "supported", "than", "the", "then", "to", "token", "too", "type", "unclosed",
        "unevaluatedItems", "unevaluatedProperties", "unimplemented", "uniqueItems", "unknown", "unsatisfiable",
    )
)  # fmt: skip
_FOLDED = frozenset(word.casefold() for word in _KEYWORDS)
_REGEX_REASON = re.compile(r"^error: (.+)$", re.MULTILINE)
# Position in the Lark text that wraps a schema.
_POSITION = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_MARKER = "<non-verbose/>"


def new_matcher(tokenizer: GrammarTokenizer, lark: str, around: str = "") -> LLMatcher:
    """Return a matcher at the start of an output. Releases the GIL. Never raises: see `is_error`.

    With `around` that is the Lark text of the output, and `lark` that of its part @answer.
    """
    grammars = [{"lark_grammar": around}] if around else []
    # A grammar of its own: its rules may have any names.
    grammars.append({"name": "answer", "lark_grammar": lark} if around else {"lark_grammar": lark})
    return LLMatcher(tokenizer.native, json.dumps({"grammars": grammars}), log_level=0, limits=LIMITS)


def is_too_complex(matcher: LLMatcher) -> bool:
    """Return True where a matcher has failed at a limit, and not at a grammar that is wrong."""
    message = _QUOTED.sub("", matcher.get_error())
    return matcher.stop_reason() in _LIMITED or any(words in message for words in _TOO_COMPLEX)


def shorten(message: str, source: str = "") -> str:
    """Shorten an llguidance message for the caller: its reason, on one line, without words of `source`, a constraint.

    What callers write is not repeated, since details of errors are logged on their way: places stay, and the schema's
    keywords.
    """
    if _FULL_ROW in message:
        return "allows too much at one place, as an object does with thousands of keys that may be left out"
    reason = _REGEX_REASON.search(message)
    line = f"invalid regex: {reason[1]}" if reason is not None else message.replace(_MARKER, "").strip()
    line = _POSITION.sub("", line.partition("\n")[0].partition(" (at ")[0])
    line = _QUOTED.sub(lambda found: found[0] if found[0][1:-1] in _KEYWORDS else "…", line)
    theirs = {word.casefold() for word in _WORD.findall(source)} - _FOLDED
    return _cut(_WORD.sub(lambda found: "…" if found[0].casefold() in theirs else found[0], line))


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 1] + "…"
