"""OpenAPI 3.1 document of the gateway, made from its tables: routes, options of generate(), bodies and answers."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock import __version__
from penstock.gateway.openapi_answers import ANSWERS, QUERIES, SCHEMAS
from penstock.gateway.openapi_bodies import BODIES, OBJECT, RequestBody, Schema
from penstock.gateway.request_fields import other_names
from penstock.gateway.text_routes import OPTIONS_JSON

# Method in lower case -> path of a route -> its handler.
Routes = Mapping[str, Mapping[str, Callable[..., Any]]]
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_PLAIN_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string"}
# Tensors go over gRPC alone; the others are fields of a route, or not for HTTP.
_NOT_HERE = frozenset(
    (
        *("output_scores", "output_logits", "output_hidden_states", "output_attentions", "scores_top_k"),
        *("tensor_steps", "model", "config", "top_logprobs", "echo"),
    )
)
_JSON, _EVENTS = "application/json", "text/event-stream"
_FORM = "multipart/form-data"


def openapi_document(routes: Routes) -> dict[str, Any]:
    """Return the document of these routes."""
    paths: dict[str, dict[str, Any]] = {}
    for method, rows in routes.items():
        for path, handler in rows.items():
            paths.setdefault(_PARAMETER.sub(r"{\1}", path), {})[method] = _operation(method, path, handler)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": __version__,
            "description": "OpenAI's and Anthropic's HTTP in front of generate(), with all of its options.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}, {}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {"GenerationOptions": _options(), **SCHEMAS},
        },
    }


def openapi_json(routes: Routes) -> bytes:
    """Return the document as JSON, indented."""
    return json.dumps(openapi_document(routes), ensure_ascii=False, indent=1).encode() + b"\n"


def _operation(method: str, path: str, handler: Callable[..., Any]) -> dict[str, Any]:
    name = ANSWERS.get((method, path))
    content: dict[str, Any] = {_JSON: {"schema": {"$ref": f"#/components/schemas/{name}"} if name else OBJECT}}
    body = BODIES.get(path) if method == "post" else None
    if path.endswith("/content"):
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    if (body is not None and body.is_streamed) or "stream" in QUERIES.get((method, path), {}):
        content[_EVENTS] = {"schema": {"type": "string"}}
    parameters = [
        {"name": one, "in": "path", "required": True, "schema": {"type": "string"}} for one in _PARAMETER.findall(path)
    ]
    parameters += [
        {"name": one, "in": "query", "schema": schema} for one, schema in QUERIES.get((method, path), {}).items()
    ]
    error = {"description": "A fault.", "content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    made: dict[str, Any] = {
        "operationId": handler.__name__,
        "summary": (inspect.getdoc(handler) or "").partition("\n")[0],
        "responses": {"200": {"description": "The answer.", "content": content}, "default": error},
    }
    if parameters:
        made["parameters"] = parameters
    if body is not None and (body.fields or body.has_options):
        form = _FORM if path == "/v1/files" else _JSON
        made["requestBody"] = {
            "required": bool(body.required) or form == _FORM,
            "content": {form: {"schema": _body(body)}},
        }
    return made


def _body(body: RequestBody) -> Schema:
    own: Schema = {"type": "object", "properties": dict(body.fields)}
    if body.required:
        own["required"] = list(body.required)
    return {"allOf": [own, {"$ref": "#/components/schemas/GenerationOptions"}]} if body.has_options else own


def _options() -> Schema:
    """Schema of the options of generate() as fields, with their other names."""
    fields: dict[str, Schema] = {}
    for row in json.loads(OPTIONS_JSON)["data"]:
        if row["name"] not in _NOT_HERE:
            fields[row["name"]] = _option(row)
    for other, name in other_names().items():
        fields[other] = {**fields.get(name, {}), "description": f"The same as {name}."}
    fields["response_format"] = {"type": "object", "description": "text, json_object or json_schema, as OpenAI's."}
    fields["structured_outputs"] = {"type": "object", "description": "A constraint under vLLM's names."}
    return {"type": "object", "properties": dict(sorted(fields.items()))}


def _option(row: Mapping[str, Any]) -> Schema:
    found: Schema = {"description": row["doc"]} if row["doc"] else {}
    if (choices := row["choices"]) is not None:
        texts = [one for one in choices if isinstance(one, str)]
        if len(texts) == len(choices):
            return {**found, "type": ["string", "null"], "enum": [*texts, None]}
        # Programs that make clients know no enum of several types.
        return {**found, "anyOf": [{"type": "boolean"}, {"type": "string", "enum": texts}, {"type": "null"}]}
    kind = _PLAIN_TYPES.get(row["kind"])
    if kind is None:
        return found
    found["type"] = [kind, "null"]
    if kind in ("integer", "number"):
        for word, name in (("inimum", "minimum"), ("aximum", "maximum")):
            if row[name] is not None:
                found[f"exclusiveM{word}" if row[f"{name}_excluded"] else name] = row[name]
    return found
