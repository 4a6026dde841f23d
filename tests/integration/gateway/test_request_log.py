"""One line in the log for each request, refused ones too; unknown paths and models tell those that there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from factories.servers.router import until
from factories.servers.scripted_gateway import ScriptedGateway, scripted_gateway
from penstock.gateway.request_log import safe_field
from structlog.testing import capture_logs

SECRET = "my-secret-words"
HELLO: list[Any] = [{"role": "user", "content": SECRET}]


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with capture_logs() as logs:
        yield logs


async def told(served: ScriptedGateway, lines: list[Any], path: str, body: Any = None) -> tuple[Any, dict[str, str]]:
    """The only new line of a request, and the answer's headers."""
    lines.clear()
    _, headers, _ = await served.ask(path, body)
    await until(lambda: any(line["event"] == "request" for line in lines))
    (line,) = [line for line in lines if line["event"] == "request"]
    assert SECRET not in json.dumps(lines)
    assert line["request_id"] == headers["x-request-id"]
    return line, headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/chat/completions", {"messages": HELLO, "stream": True}),
        ("/v1/completions", {"prompt": SECRET}),
        ("/v1/completions", {"prompt": SECRET, "stream": True}),
        ("/v1/responses", {"input": SECRET}),
        ("/v1/responses", {"input": SECRET, "stream": True}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9, "stream": True}),
    ],
    ids=lambda one: one if isinstance(one, str) else ("stream" if "stream" in one else "whole"),
)
async def test_a_request_leaves_one_line_with_its_tokens(lines: list[Any], path: str, body: Any) -> None:
    async with scripted_gateway("Fine.") as served:
        line, _ = await told(served, lines, path, body)
        assert (line["route"], line["status"], line["log_level"]) == (path, 200, "info")
        assert line["output_tokens"] == len(served.ids)
        assert line["prompt_tokens"] > 0
        assert line["seconds"] >= 0
        assert "reason" not in line


async def test_a_refused_request_leaves_its_reason_and_field(lines: list[Any]) -> None:
    async with scripted_gateway("Fine.") as served:
        line, _ = await told(served, lines, "/v1/chat/completions", {"messages": HELLO, "temperature": "hot"})
        assert (line["status"], line["reason"], line["field"]) == (400, "INVALID_FIELD", "temperature")
        line, _ = await told(served, lines, "/v1/chat/completions", {"messages": HELLO, "model": SECRET})
        assert (line["status"], line["reason"], line["field"]) == (404, "MODEL_NOT_FOUND", "model")
        line, _ = await told(served, lines, f"/{SECRET}", {})
        assert (line["route"], line["status"], line["reason"]) == ("other", 404, "PATH_NOT_FOUND")
        assert line["log_level"] == "info"


async def test_an_id_of_the_body_that_is_none_stays_out_of_header_and_log(lines: list[Any]) -> None:
    async with scripted_gateway("Fine.") as served:
        for given in ("\0", "a\nb", SECRET + " ", "é"):
            line, _ = await told(served, lines, "/v1/chat/completions", {"messages": HELLO, "request_id": given})
            assert (line["status"], len(line["request_id"])) == (200, 32)
        line, _ = await told(served, lines, "/v1/chat/completions", {"messages": HELLO, "request_id": "my-id.1"})
        assert line["request_id"] == "my-id.1"


async def test_a_fault_of_the_servers_is_a_warning(lines: list[Any]) -> None:
    async with scripted_gateway("Fine.") as served:
        served.gateway.app._places.is_draining = True
        line, _ = await told(served, lines, "/v1/chat/completions", {"messages": HELLO})
        assert (line["status"], line["log_level"]) == (503, "warning")
        served.gateway.app._places.is_draining = False


def test_words_of_the_callers_own_stay_out_of_the_log() -> None:
    assert safe_field("tools[3].function.parameters.properties.my_name.type") == "tools[3].function.parameters"
    assert safe_field("config.max_new_tokens") == "config.max_new_tokens"
    assert safe_field("messages[0].content[1].text") == "messages[0].content[1].text"
    assert safe_field("my_name") == "body"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/api/v1/messages", "/v1/messages"),
        ("/completions", "/v1/completions"),
        ("/responses", "/v1/responses"),
        ("/embeddings", "/v1/embeddings"),
        ("/models", "/v1/models"),
        ("/models/some", "/v1/models/NAME"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/health", "/health"),
    ],
)
async def test_a_path_with_another_prefix_is_told_the_one_that_is_meant(path: str, meant: str) -> None:
    async with scripted_gateway() as served:
        status, _, text = await served.ask(path)
        assert status == 404
        assert json.loads(text)["error"]["message"] == f"no such path; did you mean {meant}?"


async def test_other_paths_methods_and_models() -> None:
    async with scripted_gateway() as served:
        status, _, text = await served.ask("/v1/pictures", {})
        assert (status, b"docs/guide/gateway.md" in text) == (404, True)
        for path, body, allowed in (
            ("/v1/chat/completions", None, "POST"),
            ("/v1/models", {}, "GET, HEAD"),
            ("/v1/responses/resp_1", {}, "DELETE, GET, HEAD"),
            ("/health", {}, "GET, HEAD"),
        ):
            status, headers, text = await served.ask(path, body)
            assert (status, headers["allow"]) == (405, allowed)
            assert json.loads(text)["error"]["message"] == f"this path takes {allowed}"
        for path, body in (
            ("/v1/chat/completions", {"messages": HELLO, "model": "other"}),
            ("/v1/completions", {"prompt": "x", "model": "other"}),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "model": "other"}),
            ("/v1/responses", {"input": "x", "model": "other"}),
            ("/v1/embeddings", {"input": "x", "model": "other"}),
            ("/tokenize", {"prompt": "x", "model": "other"}),
            ("/v1/models/other", None),
        ):
            status, _, text = await served.ask(path, body)
            assert (status, "there is: penstock-demo" in json.loads(text)["error"]["message"]) == (404, True), text
