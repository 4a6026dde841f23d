"""One trace a request over router, tokenizer and generation: parents, attributes, attempts, sampling; exemplars."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import EmittingBackend
from factories.servers.generation import generation_service, text_checkpoint
from factories.servers.held_backend import held, stop_after
from factories.servers.router import Router, chat, collect, generate, running_router
from factories.servers.trace_collector import CollectedSpan, Collector, trace_collector
from factories.wire.conversation import user
from penstock.common.checkpoint import demo_folder
from penstock.common.config import ServerConfig
from penstock.common.errors import StartupError
from penstock.serving.server import serve_in_process
from penstock.tokenizer.app import TokenizerApp
from penstock.tokenizer.config import TokenizerConfig
from penstock.v1 import config_pb2
from penstock_client import AsyncClient, ClientConfig
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ROUTER, TOKENIZER, GENERATION = "penstock-router", "penstock-tokenizer", "penstock-generation"
SERVER, CLIENT = 2, 3
PROMPT = "Ein geheimer Wunsch"


def caller(sampled: bool) -> tuple[tuple[str, str], ...]:
    """W3C headers of a caller."""
    return (("traceparent", f"00-{TRACE}-{CALLER}-0{int(sampled)}"), ("tracestate", "vendor=1"))


def traced(endpoint: str, **more: Any) -> dict[str, Any]:
    """Settings of a service that sends its spans soon."""
    return {"tracing_endpoint": endpoint, "tracing_export_seconds": 0.02, **more}


def children(spans: list[CollectedSpan], parent: CollectedSpan) -> list[tuple[str, str]]:
    """(service, name) of a span's children, in their order."""
    return [(span.service, span.name) for span in spans if span.parent == parent.span_id]


def named(spans: list[CollectedSpan], name: str) -> CollectedSpan:
    """The only span of a name."""
    [found] = [span for span in spans if span.name == name]
    return found


def has_ended(name: str) -> Any:
    """Condition: a span of this name has arrived, and by its children's order all below it is on its way."""
    return lambda spans: any(span.name == name for span in spans)


@dataclass
class Services:
    """All three services in this process, with a client of the router and its metrics' addresses."""

    client: AsyncClient
    router: Router
    generation_metrics: str


@asynccontextmanager
async def services(folder: Path, endpoint: str, metadata: tuple[tuple[str, str], ...]) -> AsyncIterator[Services]:
    """Run them all over a tiny model. `metadata` goes with every call of the client."""
    settings = traced(endpoint)
    registry = CollectorRegistry()
    tokenizer = TokenizerConfig(model=str(demo_folder()), template_timeout_seconds=60.0, **settings)
    config = ClientConfig(call_metadata=lambda: metadata)
    async with (
        serve_in_process(TokenizerApp(tokenizer, registry), tokenizer, registry) as tokenizer_server,
        generation_service(text_checkpoint(folder), **settings) as generation,
        running_router(tokenizer=tokenizer_server.address, backend=(generation.running.address,), **settings) as router,
        AsyncClient(router.server.address, config) as client,
    ):
        yield Services(client, router, str(generation.running.addresses.metrics))


async def test_a_chat_is_one_trace_over_all_services(tmp_path: Path) -> None:
    with trace_collector() as collector:
        async with services(tmp_path, collector.endpoint, caller(True)) as running:
            answer = await running.client.generate(user(PROMPT), max_new_tokens=4, ignore_eos=True)
            # Exemplars: both processes' histograms name the trace, in the OpenMetrics format alone.
            for address, metric in (
                (str(running.router.server.addresses.metrics), "penstock_router_time_to_first_token_seconds"),
                (running.generation_metrics, "penstock_request_prefill_time_seconds"),
            ):
                assert await asyncio.to_thread(exemplars, address, metric) == {TRACE}
        # Closing sent what was left.
        spans = collector.until(has_ended("penstock.v1.TextService/Chat"))
    assert {span.trace_id for span in spans} == {TRACE}
    assert not [span for span in spans if span.error]
    root = named(spans, "penstock.v1.TextService/Chat")
    assert (root.service, root.kind, root.parent) == (ROUTER, SERVER, CALLER)
    assert children(spans, root) == [
        (ROUTER, "admission"),
        (ROUTER, "tokenize"),
        (ROUTER, "attempt 1"),
        (ROUTER, "detokenize"),
    ]
    template = named(spans, "penstock.v1.TokenizerService/ApplyChatTemplate")
    assert children(spans, named(spans, "tokenize")) == [(TOKENIZER, template.name)]
    assert children(spans, template) == [(TOKENIZER, "render"), (TOKENIZER, "encode")]
    work = named(spans, "generate")
    assert named(spans, "attempt 1").kind == CLIENT
    assert children(spans, named(spans, "attempt 1")) == [(GENERATION, "generate")]
    assert work.kind == SERVER
    assert children(spans, work) == [(GENERATION, "queue"), (GENERATION, "prefill"), (GENERATION, "decode")]
    assert len(spans) == 12
    for span in (root, work):
        assert span.attributes["gen_ai.request.model"] == answer.started.model
        assert span.attributes["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
        assert span.attributes["gen_ai.usage.output_tokens"] == 4
        assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["gen_ai.request.max_tokens"] == 4
    assert root.attributes["rpc.grpc.status_code"] == 0
    assert not [span for span in spans if "geheim" in json.dumps(span.attributes)]


@pytest.mark.slow
async def test_nothing_is_sent_of_a_trace_that_the_caller_does_not_keep(tmp_path: Path) -> None:
    with trace_collector() as collector:
        async with services(tmp_path, collector.endpoint, caller(False)) as running:
            await running.client.generate(PROMPT, max_new_tokens=2)
            await running.client.score([(PROMPT, " mehr")])
            metrics = str(running.router.server.addresses.metrics)
            assert not await asyncio.to_thread(exemplars, metrics, "penstock_router_time_to_first_token_seconds")
        assert not collector.spans


def exemplars(address: str, metric: str) -> set[str]:
    """Trace ids among the exemplars of a histogram; checks that the plain format and `_created` have none."""
    request = urllib.request.Request(
        f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        plain = answer.read().decode()
    assert "trace_id" not in plain
    assert "_created" not in plain + text
    [family] = [one for one in text_string_to_metric_families(text) if one.name == metric]
    return {sample.exemplar.labels["trace_id"] for sample in family.samples if sample.exemplar}


async def moved(collector: Collector, **settings: Any) -> tuple[list[CollectedSpan], EmittingBackend]:
    """Spans of a stream whose backend dies after five tokens, and the backend that went on."""
    async with (
        held(allowance=5) as one,
        held(allowance=5) as two,
        running_router(one, two, **traced(collector.endpoint, **settings)) as router,
    ):

        async def kill() -> None:
            dead, other = (one, two) if one.running else (two, one)
            others.append(other)
            await dead.stop()
            await other.allow(None)

        others: list[EmittingBackend] = []
        await collect(
            router.stub.Generate(generate(output=config_pb2.OutputConfig(return_token_ids=True))), stop_after(5, kill)
        )
    return collector.spans, others[0]


async def test_a_stream_that_moves_shows_both_attempts() -> None:
    with trace_collector() as collector:
        spans, other = await moved(collector)
    root = named(spans, "penstock.v1.TextService/Generate")
    first, second = named(spans, "attempt 1"), named(spans, "attempt 2")
    assert first.parent == second.parent == root.span_id
    assert (first.error, first.attributes["error.type"]) == ("BACKEND_LOST", "BACKEND_LOST")
    assert (second.error, second.attributes["server.address"]) == ("", other.address)
    assert second.attributes["penstock.resumed_tokens"] == 5
    assert second.begin >= first.end
    assert root.attributes["penstock.attempts"] == 2
    [again] = other.submitted
    assert again.traceparent == f"00-{root.trace_id}-{second.span_id}-01"
    assert not root.error


async def test_at_ratio_0_nothing_is_kept_and_the_decision_travels_on() -> None:
    with trace_collector() as collector:
        spans, other = await moved(collector, tracing_sample_ratio=0.0)
    assert not spans
    assert other.submitted[0].traceparent.endswith("-00")


async def test_a_refused_call_has_its_reason_and_no_status_of_a_fault() -> None:
    with trace_collector() as collector:
        async with held() as one, running_router(one, **traced(collector.endpoint)) as router:
            with pytest.raises(grpc.aio.AioRpcError):
                await collect(router.stub.Chat(chat(model="no such model")))
        [span] = [span for span in collector.spans if span.kind == SERVER]
    assert span.attributes["error.type"] == "MODEL_NOT_FOUND"
    assert not span.error


async def test_without_an_endpoint_a_request_carries_no_trace() -> None:
    async with held(allowance=None) as one, running_router(one) as router:
        await collect(router.stub.Generate(generate(), metadata=caller(True)))
        assert one.submitted[0].traceparent == ""


async def test_a_file_has_a_line_of_otlp_json_for_each_batch(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    async with held(allowance=None) as one, running_router(one, **traced(f"file:{path}")) as router:
        await collect(router.stub.Generate(generate(), metadata=caller(True)))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    spans = [
        span
        for line in lines
        for resource in line["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    [root] = [span for span in spans if span["name"] == "penstock.v1.TextService/Generate"]
    assert (root["traceId"], root["parentSpanId"], root["kind"]) == (TRACE, CALLER, 2)
    assert int(root["endTimeUnixNano"]) > int(root["startTimeUnixNano"])
    assert {"key": "gen_ai.operation.name", "value": {"stringValue": "text_completion"}} in root["attributes"]


@pytest.mark.parametrize("endpoint", ["collector:4318", "file:/no/such/folder/traces.jsonl"])
async def test_an_endpoint_that_is_none_ends_the_start(endpoint: str) -> None:
    with pytest.raises(StartupError, match=r"--tracing-endpoint|cannot write traces") as raised:
        async with held() as one, running_router(one, tracing_endpoint=endpoint):
            pass
    assert raised.value.flag == "--tracing-endpoint"
    assert ServerConfig.tracing_endpoint is None
