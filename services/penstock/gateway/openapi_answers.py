"""Answers of the gateway for its OpenAPI document: schemas by name, and the name of each route's answer.

They say which fields are there; answers may have more. tests/integration/gateway/test_openapi.py holds real answers to
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.gateway.openapi_bodies import FLAG, NUMBER, OBJECT, TEXT, Schema


def _object(kind: str = "", /, **fields: Schema) -> Schema:
    """Schema of an object with these fields; `kind`: its `object`."""
    told = {"object": {"const": kind}} if kind else {}
    return {"type": "object", "properties": {**told, **fields}, "required": [*told, *fields]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(kind: str) -> Schema:
    return {"type": [kind, "null"]}


_USAGE = _object(prompt_tokens=NUMBER, completion_tokens=NUMBER, total_tokens=NUMBER)
_PAGE: Mapping[str, Schema] = {"first_id": _or_null("string"), "last_id": _or_null("string"), "has_more": FLAG}
_CALL = _object(id=TEXT, type=TEXT)
_DELETED = _object(id=TEXT, object=TEXT, deleted=FLAG)
SCHEMAS: Mapping[str, Schema] = {
    "Error": _object(error=_object(message=TEXT, type=TEXT, code=TEXT, reason=TEXT)),
    "Extras": _object(timings=OBJECT, warnings=_list(TEXT)),
    "Usage": _USAGE,
    "ChatCompletion": _object(
        "chat.completion",
        id=TEXT,
        created=NUMBER,
        model=TEXT,
        choices=_list(
            _object(
                index=NUMBER,
                message={
                    "type": "object",
                    "required": ["role", "content"],
                    "properties": {
                        "role": {"const": "assistant"},
                        "content": _or_null("string"),
                        "reasoning_content": TEXT,
                        "tool_calls": _list(_CALL),
                    },
                },
                finish_reason={"enum": ["stop", "length", "tool_calls"]},
            )
        ),
        usage=_ref("Usage"),
        penstock=_ref("Extras"),
    ),
    "TextCompletion": _object(
        "text_completion",
        id=TEXT,
        created=NUMBER,
        model=TEXT,
        choices=_list(_object(index=NUMBER, text=TEXT, finish_reason=TEXT)),
        usage=_ref("Usage"),
    ),
    "Message": _object(
        id=TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=TEXT,
        content=_list(_object(type=TEXT)),
        stop_reason=_or_null("string"),
        usage=_object(input_tokens=NUMBER, output_tokens=NUMBER),
    ),
    "InputTokens": _object(input_tokens=NUMBER),
    # Not Response: programs that make clients have a class of this name.
    "ModelResponse": _object(
        "response",
        id=TEXT,
        created_at=NUMBER,
        status={"enum": ["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]},
        model=TEXT,
        output=_list(_object(type=TEXT)),
        error=_or_null("object"),
        usage=_or_null("object"),
    ),
    "Conversation": _object("conversation", id=TEXT, created_at=NUMBER, metadata=OBJECT),
    "Item": _object(id=TEXT, type=TEXT),
    "ItemList": _object("list", data=_list(_ref("Item")), **_PAGE),
    "Deleted": _DELETED,
    "Models": _object("list", data=_list(_object(id=TEXT, object=TEXT))),
    "Model": _object(id=TEXT, object=TEXT),
    "Embeddings": _object(
        "list",
        model=TEXT,
        data=_list(_object(index=NUMBER, embedding={"oneOf": [_list({"type": "number"}), TEXT]})),
        usage=OBJECT,
    ),
    "Scores": _object(object=TEXT, data=_list(OBJECT)),
    "File": _object("file", id=TEXT, bytes=NUMBER, created_at=NUMBER, filename=TEXT, purpose=TEXT),
    "Files": _object("list", data=_list(_ref("File")), **_PAGE),
    "Batch": _object("batch", id=TEXT, endpoint=TEXT, status=TEXT, input_file_id=TEXT),
    "Batches": _object("list", data=_list(_ref("Batch")), **_PAGE),
    "Tokens": _object(tokens=_list(NUMBER), count=NUMBER, max_model_len=NUMBER),
    "Prompt": _object(prompt=TEXT),
    "TokenizerInfo": _object(tokenizer_class=TEXT, eos_token=_or_null("string"), vocab_size=NUMBER, chat_template={}),
    "Options": _object("list", data=_list(_object(name=TEXT, kind=TEXT, doc=TEXT))),
}
# Method and route -> name of the schema.
ANSWERS: Mapping[tuple[str, str], str] = {
    ("post", "/v1/chat/completions"): "ChatCompletion",
    ("post", "/v1/completions"): "TextCompletion",
    ("post", "/v1/messages"): "Message",
    ("post", "/v1/messages/count_tokens"): "InputTokens",
    ("post", "/v1/responses"): "ModelResponse",
    ("post", "/v1/responses/input_tokens"): "InputTokens",
    ("post", "/v1/responses/{name}/cancel"): "ModelResponse",
    ("get", "/v1/responses/{name}"): "ModelResponse",
    ("get", "/v1/responses/{name}/input_items"): "ItemList",
    ("delete", "/v1/responses/{name}"): "Deleted",
    ("post", "/v1/conversations"): "Conversation",
    ("post", "/v1/conversations/{name}"): "Conversation",
    ("get", "/v1/conversations/{name}"): "Conversation",
    ("delete", "/v1/conversations/{name}"): "Deleted",
    ("post", "/v1/conversations/{name}/items"): "ItemList",
    ("get", "/v1/conversations/{name}/items"): "ItemList",
    ("get", "/v1/conversations/{name}/items/{item}"): "Item",
    ("delete", "/v1/conversations/{name}/items/{item}"): "Conversation",
    ("post", "/v1/embeddings"): "Embeddings",
    ("post", "/v1/score"): "Scores",
    ("get", "/v1/models"): "Models",
    ("get", "/v1/models/{name:path}"): "Model",
    ("post", "/v1/files"): "File",
    ("get", "/v1/files"): "Files",
    ("get", "/v1/files/{name}"): "File",
    ("delete", "/v1/files/{name}"): "Deleted",
    ("post", "/v1/batches"): "Batch",
    ("get", "/v1/batches"): "Batches",
    ("get", "/v1/batches/{name}"): "Batch",
    ("post", "/v1/batches/{name}/cancel"): "Batch",
    ("post", "/tokenize"): "Tokens",
    ("post", "/detokenize"): "Prompt",
    ("post", "/apply-template"): "Prompt",
    ("get", "/options"): "Options",
    ("get", "/tokenizer_info"): "TokenizerInfo",
}
# Queries of routes that read one.
_NUMBER_QUERY, _TEXT_QUERY = {"type": "integer"}, {"type": "string"}
_LIST_QUERY: Mapping[str, Schema] = {
    "after": _TEXT_QUERY,
    "limit": _NUMBER_QUERY,
    "order": {"type": "string", "enum": ["asc", "desc"]},
}
QUERIES: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("get", "/v1/responses/{name}"): {"stream": FLAG, "starting_after": _NUMBER_QUERY},
    ("get", "/v1/responses/{name}/input_items"): _LIST_QUERY,
    ("get", "/v1/conversations/{name}/items"): _LIST_QUERY,
    ("get", "/v1/files"): {**_LIST_QUERY, "purpose": _TEXT_QUERY},
    ("get", "/v1/batches"): {"after": _TEXT_QUERY, "limit": _NUMBER_QUERY},
    ("get", "/tokenizer_info"): {"model": _TEXT_QUERY},
}
