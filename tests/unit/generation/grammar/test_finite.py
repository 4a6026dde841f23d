"""Schemas whose documents would never end."""

from __future__ import annotations

from typing import Any

import pytest
from factories.engine.schemas import SCHEMAS
from penstock.generation.grammar.finite import has_finite_document
from penstock.generation.grammar.spec import ConstraintKind
from penstock.generation.grammar.translate import Untranslatable, to_lark

NODE = {"$ref": "#/$defs/node"}


def tree(node: Any) -> dict[str, Any]:
    return {"$defs": {"node": node}, **NODE}


ENDLESS = {
    "itself": {"$ref": "#"},
    "required child": tree({"type": "object", "properties": {"c": NODE}, "required": ["c"]}),
    "by way of another": {
        "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b~1x"}]}, "b/x": {"$ref": "#/%24defs/a"}},
        "$ref": "#/$defs/a",
    },
    "every alternative": tree({"anyOf": [{"type": "array", "items": NODE, "minItems": 1}, NODE]}),
    "prefix": tree({"type": "array", "prefixItems": [True, NODE], "minItems": 2}),
    "other properties": tree({"type": ["object"], "additionalProperties": NODE, "required": ["x"]}),
}
FINITE = {
    "one alternative": tree({"anyOf": [NODE, {"type": "null"}]}),
    "optional child": tree({"type": "object", "properties": {"c": NODE}}),
    "empty array": tree({"type": "array", "items": NODE}),
    "prefix that may be left out": tree({"type": "array", "prefixItems": [True, NODE], "minItems": 1}),
    "any type": tree({"properties": {"c": NODE}, "required": ["c"]}),
    "constant": tree({"const": 1, "type": "object", "properties": {"c": NODE}, "required": ["c"]}),
    "unknown reference": {"$ref": "#somewhere"},
    "elsewhere": {"$ref": "https://example.com/"},
    "odd values": {"type": "array", "minItems": "3", "required": 4, "allOf": {}, "$ref": "#/$defs/0/1"},
    "shared often": {
        "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)} | {"d60": {}},
        "$ref": "#/$defs/d0",
    },
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_requires_itself_is_refused(name: str) -> None:
    assert not has_finite_document(ENDLESS[name])


@pytest.mark.parametrize("name", FINITE)
def test_what_can_end_is_not(name: str) -> None:
    assert has_finite_document(FINITE[name])


@pytest.mark.parametrize("name", SCHEMAS)
def test_ordinary_schemas_have_documents(name: str) -> None:
    assert has_finite_document(SCHEMAS[name])


def test_the_compiler_says_so() -> None:
    with pytest.raises(Untranslatable, match="requires itself"):
        to_lark(ConstraintKind.JSON_SCHEMA, '{"$ref": "#"}', ())
