"""The official JSON Schema test suite, 2020-12, token by token: what compiles is honoured, the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories.engine.grammars import accepts, grammar_tokenizer, spellings
from penstock.generation.grammar.matcher_state import CompiledGrammar
from penstock.generation.grammar.matching import new_matcher
from penstock.generation.grammar.trial_process import answer_to

SUITE = Path(__file__).parents[3] / "data" / "json-schema-test-suite"
PAGE = (Path(__file__).parents[4] / "docs" / "guide" / "structured-output.md").read_text(encoding="utf-8")
# File -> (cases that are honoured, cases of schemas that are refused), as in the table of PAGE.
HONOURED = {
    "draft2020-12": {
        "additionalProperties": (20, 0), "allOf": (28, 2), "anchor": (8, 0), "anyOf": (16, 1), "const": (46, 0),
        "contains": (2, 19), "content": (18, 0), "default": (7, 0), "dependentRequired": (20, 0),
        "dependentSchemas": (15, 4), "enum": (41, 0), "exclusiveMaximum": (4, 0), "exclusiveMinimum": (4, 0),
        "format": (123, 0), "if-then-else": (12, 14), "infinite-loop-detection": (2, 0), "items": (29, 0),
        "maxContains": (2, 10), "maxItems": (4, 2), "maxLength": (5, 2), "maxProperties": (10, 0), "maximum": (8, 0),
        "minContains": (4, 24), "minItems": (4, 2), "minLength": (5, 2), "minProperties": (8, 0), "minimum": (11, 0),
        "multipleOf": (9, 1), "not": (9, 31), "oneOf": (3, 24), "pattern": (9, 0), "patternProperties": (8, 15),
        "prefixItems": (11, 0), "properties": (27, 0), "propertyNames": (18, 2), "ref": (68, 9), "required": (16, 0),
        "type": (79, 0), "unevaluatedItems": (24, 41), "unevaluatedProperties": (49, 73), "uniqueItems": (28, 41),
    },
    "format": {
        "date-time": (23, 0), "date": (47, 0), "duration": (26, 0), "email": (18, 0), "hostname": (25, 0),
        "ipv4": (16, 0), "ipv6": (36, 0), "time": (39, 0), "uri": (26, 0), "uuid": (21, 0),
    },
}  # fmt: skip
# Valid documents that the grammar does not write: (file, word of the description) -> how many. Numbers are written one
# way (1, never 1.0, for an integer), the known `format`s always count, addresses are the common ones, a minute has no
# leap second, an object has the keys that its schema names. No invalid document may be written.
TOO_STRICT = {
    ("additionalProperties", "allowed by default"): 1,
    ("anyOf", "both anyOf valid"): 1,
    ("const", "float"): 4,
    ("dependentSchemas", "property having schema true"): 1,
    ("enum", "valid"): 4,
    ("properties", "invalidate other properties"): 1,
    ("type", "zero fractional part"): 1,
    ("unevaluatedItems", "if without then and else"): 1,
    ("unevaluatedProperties", "if without then and else"): 1,
    ("unevaluatedProperties", "in an uncle schema"): 1,
    ("format", "only an annotation"): 10,
    ("email", "is valid"): 4,
    ("ipv6", "mixed format"): 3,
    ("ipv6", "long valid"): 1,
    ("date-time", "leap second"): 2,
    ("time", "leap second"): 6,
}
CASES = [(folder, name) for folder, files in HONOURED.items() for name in files]
FILES = sorted(path.stem for path in (SUITE / "draft2020-12").glob("*.json"))
REFUSED = [name for name in FILES if name not in HONOURED["draft2020-12"]]


def groups(folder: str, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((SUITE / folder / f"{name}.json").read_text(encoding="utf-8"))
    return found


def compile_schema(document: Any) -> CompiledGrammar | None:
    """Compile in the trial process's way, then in the service's; None: refused, with a reason."""
    tokenizer = grammar_tokenizer()
    answer = answer_to(tokenizer, {"kind": "json_schema", "text": json.dumps(document), "choices": ()}, 10.0)
    if "lark" not in answer:
        assert answer.get("refused") or answer["too_complex"]
        return None
    return CompiledGrammar(new_matcher(tokenizer, answer["lark"]), tokenizer, "constraint.json_schema")


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_what_compiles_is_honoured(folder: str, name: str) -> None:
    right = refused = 0
    wrong: dict[bool, list[str]] = {True: [], False: []}
    for group in groups(folder, name):
        grammar = compile_schema(group["schema"])
        for case in group["tests"]:
            if grammar is None:
                refused += 1
            elif any(accepts(grammar, text) for text in spellings(case["data"])) == case["valid"]:
                right += 1
            else:
                wrong[case["valid"]].append(f"{group['description']}: {case['description']}")
    assert (right, refused) == HONOURED[folder][name], wrong
    assert wrong[False] == []
    expected = {word: count for (file, word), count in TOO_STRICT.items() if file == name and file_of(name) == folder}
    assert len(wrong[True]) == sum(expected.values()), wrong[True]
    assert all(any(word in description for word in expected) for description in wrong[True]), wrong[True]


def file_of(name: str) -> str:
    return "format" if name in HONOURED["format"] else "draft2020-12"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_does_not_compile(name: str) -> None:
    assert [group["description"] for group in groups("draft2020-12", name) if compile_schema(group["schema"])] == []


def test_the_page_has_the_same_table() -> None:
    for folder, files in HONOURED.items():
        for name, (honoured, refused) in files.items():
            assert f"| `{name}` | {honoured} | {refused} |" in PAGE, (folder, name)
    assert all(f"`{name}`" in PAGE for name in REFUSED)
