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
