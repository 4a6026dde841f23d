"""One trace of an HTTP chat: gateway, router, tokenizer, generation, in a file that all of them append to."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from factories.servers.gateway import Gateway, running_gateway
from factories.servers.generation import generation_service, text_checkpoint
from factories.servers.router import backend, running_router
from penstock.common.checkpoint import demo_folder
from penstock.serving.server import serve_in_process
from penstock.tokenizer.app import TokenizerApp
from penstock.tokenizer.config import TokenizerConfig
from prometheus_client import CollectorRegistry

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER = 2
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Ein geheimer Wunsch"}], "max_tokens": 4}


async def ask(gateway: Gateway, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """Status and text of an answer."""

    def send() -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        url = gateway.url.removesuffix("/v1") + path
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(send)


@asynccontextmanager
async def stack(folder: Path, endpoint: str) -> AsyncIterator[Gateway]:
    """Run all four processes' services over a tiny model."""
    settings: dict[str, Any] = {"tracing_endpoint": endpoint, "tracing_export_seconds": 0.02}
    registry = CollectorRegistry()
    tokenizer = TokenizerConfig(model=str(demo_folder()), template_timeout_seconds=60.0, **settings)
    async with (
        serve_in_process(TokenizerApp(tokenizer, registry), tokenizer, registry) as texts,
        generation_service(text_checkpoint(folder), **settings) as generation,
        running_router(tokenizer=texts.address, backend=(generation.running.address,), **settings) as router,
        running_gateway(router.server.address, **settings) as gateway,
    ):
        yield gateway


def spans_of(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Spans of a file of traces by service and name; each name must be there once."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            service = dict(map(_pair, resource["resource"]["attributes"]))["service.name"]
            for span in resource["scopeSpans"][0]["spans"]:
                assert (service, span["name"]) not in found
                found[service, span["name"]] = span
    return found


def _pair(attribute: dict[str, Any]) -> tuple[str, Any]:
    (value,) = attribute["value"].values()
    return attribute["key"], value


async def test_a_chat_is_one_trace_from_its_caller_to_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    async with stack(tmp_path / "model", f"file:{path}") as gateway:
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
        status, text = await ask(gateway, "/v1/chat/completions", CHAT, **headers)
        assert status == 200, text
        # A span of the gateway's own is for requests that make work.
        assert (await ask(gateway, "/v1/models", **headers))[0] == 200
        _, metrics = await ask(gateway, "/metrics", accept="application/openmetrics-text")
    spans = spans_of(path)
    assert {span["traceId"] for span in spans.values()} == {TRACE}
    root = spans["penstock-gateway", "POST /v1/chat/completions"]
    assert (root["kind"], root["parentSpanId"], root["traceState"]) == (SERVER, CALLER, "vendor=1")
    assert dict(map(_pair, root["attributes"])) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "http.response.status_code": "200",
    }
    parents = {
        ("penstock-router", "penstock.v1.TextService/Chat"): ("penstock-gateway", "POST /v1/chat/completions"),
        ("penstock-tokenizer", "penstock.v1.TokenizerService/ApplyChatTemplate"): ("penstock-router", "tokenize"),
        ("penstock-generation", "generate"): ("penstock-router", "attempt 1"),
    }
    for child, parent in parents.items():
        assert spans[child]["parentSpanId"] == spans[parent]["spanId"], child
    assert [name for service, name in spans if service == "penstock-gateway"] == [root["name"]]
    # Of the duration; a stream has one of its first token, too.
    assert f'# {{trace_id="{TRACE}"}}' in metrics


async def test_a_failed_request_names_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    async with (
        backend() as one,
        running_router(one) as router,
        running_gateway(router.server.address, tracing_endpoint=f"file:{path}") as gateway,
    ):
        assert (await ask(gateway, "/v1/chat/completions", {**CHAT, "model": "none"}))[0] == 404
    root = spans_of(path)["penstock-gateway", "POST /v1/chat/completions"]
    attributes = dict(map(_pair, root["attributes"]))
    assert (attributes["error.type"], attributes["http.response.status_code"]) == ("MODEL_NOT_FOUND", "404")
    # A caller's fault is none of the server's.
    assert root["status"] == {"code": 0}
