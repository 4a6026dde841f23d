"""Patterns that begin with look-aheads: outputs are those that Python's `re` takes."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from factories.engine.grammars import accepts, compiled, lark, regex, schema
from penstock.generation.grammar.lookaheads import without_lookaheads
from penstock.generation.grammar.plain_texts import text_terminal

# Pattern -> characters that texts of up to four are made of, and longer texts.
PATTERNS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": ("0.-", ["+12.50", "--"]),  # pydantic 2.12, of a Decimal
    r"^(?=.*[A-Z])(?=.*\d).{4,}$": ("aA1", ["password", "Passw0rd"]),
    r"^(?!admin$)[a-z0-9]+$": ("a0", ["admin", "admins", "admi"]),
    r"^(?!.*--)[a-z-]+$": ("a-", ["a-b-c", "a-b--c"]),
    r"^(?!-)[a-z-]*[a-z]$": ("a-", []),
    r"^(?!ab|a0$)[a-c0]*$": ("ab0", []),
    r"^(?!$)a*$": ("ab", []),
    r"^(?!.*[ac])[a-d]+$": ("abd", []),
    r"^(?=a|b)[a-c]{2,}$": ("abc", []),
    r"^(?=.{2,3}$)a*b*$": ("ab", []),
    r"^(?![0]+$)[01]*$": ("01", []),
    r"^(?!\^|\])[\^\]a]+$": ("^]a", []),
    r"^(?!\d)\w+$": ("a0_", []),
    r"^(?=ab)": ("ab", []),
    r"^(?=.*\$)a*\$$": ("a$", []),
}
# Only what stands behind `~` can say these; a schema is refused, a regex is not.
IN_FULL = {r"^(?!.*(?:ab|bc))[abc]*$": "abc", r"^(?!.*a.b)[abc]*$": "abc"}


def texts_of(characters: str, others: list[str]) -> list[str]:
    return [*("".join(one) for size in range(5) for one in itertools.product(characters, repeat=size)), *others]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_schemas_pattern_with_look_aheads_allows_what_it_says(pattern: str) -> None:
    grammar = compiled(schema({"type": "string", "pattern": pattern}))
    for text in texts_of(*PATTERNS[pattern]):
        takes = accepts(grammar, json.dumps(text))
        assert takes == (re.search(pattern, text) is not None), text


@pytest.mark.parametrize("pattern", [*PATTERNS, *IN_FULL])
@pytest.mark.parametrize("start", ["^", ""])
def test_a_regex_with_look_aheads_allows_what_it_says(pattern: str, start: str) -> None:
    grammar = compiled(regex(start + pattern[1:]))
    characters, others = PATTERNS.get(pattern) or (IN_FULL[pattern], [])
    for text in texts_of(characters, others)[1:]:
        takes = accepts(grammar, text)
        assert takes == (re.fullmatch(pattern, text) is not None), text


def test_a_text_of_a_tool_call_outside_json_obeys_look_aheads() -> None:
    terminal = text_terminal({"type": "string", "pattern": r"^(?!.*--)[a-z-]+$", "x-end": "</p>"}, 0, json.dumps)
    grammar = compiled(lark(f"start: TEXT\nTEXT: {terminal}"))
    for text, is_right in (("a-b", True), ("a--b", False), ("a", True)):
        assert accepts(grammar, f"{text}</p>") == is_right


@pytest.mark.parametrize(
    "pattern",
    [
        f"^(?!{'ab' * 32}a)a",
        "^a(?=b)b$",
        "(?=a)b",
        "^(?=a)b|c",
        "^(?!.*(?:ab|bc))a",
        "^(?!a{2})a",
        "^(?=a",
        "^(?=a)+b",
        "^(?<=a)b",
        "^a",
    ],
)
def test_other_patterns_stay_as_they_are(pattern: str) -> None:
    assert without_lookaheads(pattern) is None


def test_the_longest_text_that_is_turned_round_is_one_that_is_compiled() -> None:
    text = "ab" * 32
    grammar = compiled(schema({"type": "string", "pattern": f"^(?!{text})[ab]*$"}))
    assert accepts(grammar, json.dumps(text[:-1]))
    assert not accepts(grammar, json.dumps(text))
