"""A misspelt field is told in the body of every kind of answer, and only of the request that has it."""

from __future__ import annotations

from typing import Any

import pytest
from factories.servers.served import Served

pytestmark = pytest.mark.xdist_group("gateway")
NOTE = "temprature is not known and has no effect, did you mean temperature?"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2, "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_slip_is_in_the_answers_warnings(served: Served, path: str) -> None:
    model = served.client.models.list().data[0].id
    body = {"model": model, **BODIES[path]}
    told = served.json(path, {**body, "temprature": 1, "use_cache": False})["penstock"]["warnings"]
    assert NOTE in told
    assert any(one.startswith("use_cache has no effect") for one in told)
    assert NOTE not in served.json(path, body)["penstock"]["warnings"]
    if path.endswith("completions"):
        chunks = served.events(path, {**body, "temprature": 1, "stream_options": {"include_usage": True}})
        assert NOTE in chunks[-1]["penstock"]["warnings"]


def test_best_of_returns_the_likeliest_of_several(served: Served) -> None:
    model = served.client.models.list().data[0].id
    body = {"model": model, "prompt": "Penstock", "max_tokens": 4, "temperature": 1.0, "seed": 3}
    every = served.json("/v1/completions", {**body, "n": 4, "logprobs": 0})["choices"]
    means = [sum(one["logprobs"]["token_logprobs"]) / len(one["logprobs"]["token_logprobs"]) for one in every]
    best = served.json("/v1/completions", {**body, "best_of": 4})
    assert [one["text"] for one in best["choices"]] == [every[means.index(max(means))]["text"]]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] > 4
    two = served.json("/v1/completions", {**body, "best_of": 4, "n": 2})["choices"]
    assert [one["index"] for one in two] == [0, 1]
    for wrong in ({"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}):
        status, _, text = served.ask("/v1/completions", {**body, **wrong})
        assert status == 400
        assert b"best_of" in text
