"""Real answers of the gateway obey the schemas that its OpenAPI document has for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from factories.servers.served import Served
from jsonschema import Draft202012Validator

pytestmark = pytest.mark.xdist_group("gateway")
MESSAGES = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/conversations": {"metadata": {"a": "b"}},
    "/v1/embeddings": {"input": "Hello"},
    "/v1/score": {"prompt": "Hello", "continuation": " you"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [300]},
    "/apply-template": {"messages": MESSAGES},
}


def test_answers_are_as_the_document_says(served: Served) -> None:
    document = served.json("/openapi.json")
    assert document["openapi"] == "3.1.0"

    def check(path: str, method: str, status: str, answer: Any) -> None:
        content = document["paths"][path][method]["responses"][status]["content"]["application/json"]
        schema = {**content["schema"], "components": document["components"]}
        assert list(Draft202012Validator(schema).iter_errors(answer)) == [], path

    for path, body in ASKED.items():
        check(path, "post", "200", served.json(path, body))
        request = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert Draft202012Validator({**request, "components": document["components"]}).is_valid(body), path
    for path in ("/v1/models", "/options", "/tokenizer_info"):
        check(path, "get", "200", served.json(path))
    told = served.json("/tokenizer_info?model=penstock-demo")
    assert told["eos_token"] == served.json("/detokenize", {"tokens": [told["eos_token_id"]]})["prompt"] != ""
    assert "{%" in told["chat_template"]
    status, _, text = served.ask("/tokenizer_info?model=none")
    error = json.loads(text)["error"]
    assert (status, error["param"], error["message"].partition(":")[0]) == (404, "model", "model")
    kept = served.json("/v1/conversations", {"items": [{"role": "user", "content": "Hello"}]})["id"]
    check("/v1/conversations/{name}/items", "get", "200", served.json(f"/v1/conversations/{kept}/items"))
    status, _, text = served.ask("/v1/chat/completions", {"messages": 3})
    assert status == 400
    check("/v1/chat/completions", "post", "default", json.loads(text))
