"""Construction of llguidance's matchers, with the limits of each of their steps. No other module makes one."""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher, LLParserLimits

from penstock.generation.grammar.tokenizer import GrammarTokenizer

# llguidance's defaults, except a lexer of 100 MB instead of 500, and messages without the grammar in them. They bound
# the cost of a mask or a token while a request runs. Costs of compiling that they do not bound, the trial process does.
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_MAX_MESSAGE, _MAX_QUOTE = 200, 40
_QUOTED = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|/(?:[^/\\\n]|\\.)*/)""")
_REGEX_REASON = re.compile(r"^error: (.+)$", re.MULTILINE)
# Position in the Lark text that wraps a schema.
_POSITION = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_MARKER = "<non-verbose/>"


def new_matcher(tokenizer: GrammarTokenizer, lark: str) -> LLMatcher:
    """Return a matcher at the start of an output. Releases the GIL. Never raises: see `is_error`."""
    return LLMatcher(tokenizer.native, json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0, limits=LIMITS)


def shorten(message: str) -> str:
    """Shorten an llguidance message for the caller: its reason, on one line, with a few words of the source at most."""
    reason = _REGEX_REASON.search(message)
    if reason is not None:
        return _cut(f"invalid regex: {reason[1]}")
    line = message.replace(_MARKER, "").strip().partition("\n")[0]
    line = _POSITION.sub("", line.partition(" (at ")[0])
    return _cut(_QUOTED.sub(lambda found: found[0] if len(found[0]) <= _MAX_QUOTE else "…", line))


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 1] + "…"
