"""OpenAPI document of the gateway: made from its tables, held to its routes and to the fields that handlers read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from factories.source_tree import PACKAGE, ROOT
from jsonschema import Draft202012Validator
from penstock.gateway.app import ROUTES
from penstock.gateway.openapi import openapi_document, openapi_json
from penstock.gateway.openapi_answers import ANSWERS, QUERIES
from penstock.gateway.openapi_bodies import BODIES

DOCUMENT = openapi_document(ROUTES)
_READ = re.compile(r"fields\.(?:raw|get|maybe)\(\s*\"(\w+)\"")
# Fields that routes take for all of them, or have no effect.
_OF_OPTIONS = {"response_format", "structured_outputs", "guided_json_object", "guided_whitespace_pattern"}
_OF_OPTIONS |= {"use_beam_search", "best_of", "n", "max_tokens"}
# Fields that are read to be refused.
_REFUSED = {"mcp_servers", "context_management", "prompt"}
FILES = ("chat", "chat_tools", "completions", "messages", "text_routes", "responses", "conversations", "batch_routes")


def test_the_file_is_what_the_code_makes() -> None:
    path = ROOT / "docs" / "reference" / "openapi.json"
    assert path.read_bytes() == openapi_json(ROUTES), "run make docs"


def test_every_route_has_its_body_and_its_answer() -> None:
    assert BODIES.keys() == ROUTES["post"].keys()
    routes = {(method, path) for method, rows in ROUTES.items() for path in rows}
    assert ANSWERS.keys() | QUERIES.keys() <= routes
    # A refusal, and the bytes of a file.
    assert routes - ANSWERS.keys() == {("post", "/v1/responses/compact"), ("get", "/v1/files/{name}/content")}
    names = [operation["operationId"] for rows in DOCUMENT["paths"].values() for operation in rows.values()]
    assert len(set(names)) == len(names) == len(routes)
    assert all(operation["summary"] for rows in DOCUMENT["paths"].values() for operation in rows.values())


@pytest.mark.parametrize("name", FILES)
def test_every_field_that_a_handler_reads_is_told(name: str) -> None:
    read = set(_READ.findall((PACKAGE / "gateway" / f"{name}.py").read_text(encoding="utf-8")))
    assert read
    told = {field for body in BODIES.values() for field in body.fields}
    assert read - told - _OF_OPTIONS - _REFUSED == set()


def test_every_field_that_is_told_is_read() -> None:
    text = "".join(
        path.read_text(encoding="utf-8")
        for path in Path(PACKAGE / "gateway").glob("*.py")
        if "openapi" not in path.name
    )
    fields = {field for body in BODIES.values() for field in body.fields}
    assert {field for field in fields if f'"{field}"' not in text} == set()


def test_its_schemas_are_schemas_and_its_references_are_there() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    used = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert used <= DOCUMENT["components"]["schemas"].keys()
    options = DOCUMENT["components"]["schemas"]["GenerationOptions"]["properties"]
    assert options["temperature"]["type"] == ["number", "null"]
    assert options["max_tokens"]["description"] == "The same as max_new_tokens."
