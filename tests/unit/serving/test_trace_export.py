"""Spans as they leave a process: of calls, of a request's stages, of attempts. No server is needed for that."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from factories.engine.fake_engine import request
from penstock.common.config import ServerConfig
from penstock.common.errors import InvalidArgument, PenstockError, StartupError, Unavailable
from penstock.common.metrics import GrpcServerMetrics
from penstock.common.tracing import current_span, exemplar, outgoing, parse_context, stage
from penstock.generation.core.request import FinishedOutput, FinishReason, RequestTimings, SequenceFinish
from penstock.generation.delivery.request_spans import begin_in_session, end_finished, end_refused
from penstock.router.requests.attempt_spans import begin_attempt
from penstock.serving.interceptors import CallInterceptor
from penstock.serving.trace_export import Tracing, start_tracing
from penstock.v1 import generation_pb2
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
KEPT, NOT_KEPT = (f"00-{TRACE}-{CALLER}-{flags}" for flags in ("01", "00"))
Work = Callable[[], Awaitable[str]]


class Context:
    """A call without a connection."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self.aborted: grpc.StatusCode | None = None
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def set_trailing_metadata(self, _: object) -> None:
        pass

    def when_over(self, _: Callable[[], None]) -> None:
        pass

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    async def abort(self, code: grpc.StatusCode, *_: object) -> None:
        self.aborted = code
        raise grpc.aio.AbortError


class Traces:
    """A tracer into a file, and what came out."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path
        config = ServerConfig(tracing_endpoint=f"file:{path}", **settings)
        self.tracer = start_tracing(config, "router")

    def spans(self) -> dict[str, Any]:
        """End the tracer, and read its spans by name."""
        self.tracer.close()
        found = {}
        for line in self.path.read_text().splitlines():
            [resource] = json.loads(line)["resourceSpans"]
            [scope] = resource["scopeSpans"]
            found.update({span["name"]: span for span in scope["spans"]})
        return found


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    return Traces(tmp_path / "traces.jsonl")


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    yield
    structlog.contextvars.clear_contextvars()


def attribute(span: Any, name: str) -> Any:
    """Value of a span's attribute, in OTLP's JSON form."""
    [found] = [pair["value"] for pair in span["attributes"] if pair["key"] == name]
    return found


async def call(
    tracer: Tracing | None, work: Work, method: str = "Chat", traceparent: str = KEPT
) -> tuple[Context, str]:
    """Call a method of a wrapped handler; return its context and the metrics afterwards."""
    registry = CollectorRegistry()
    calls = CallInterceptor(
        GrpcServerMetrics(registry), tracer=tracer, tokens=None, max_concurrent_rpcs=8, max_message_fields=8
    )

    async def behavior(_: Any, __: Any) -> str:
        return await work()

    handler = calls.wrap(f"/penstock.v1.TextService/{method}", grpc.unary_unary_rpc_method_handler(behavior))
    context = Context(("traceparent", traceparent), ("tracestate", "vendor=1"))
    try:
        await handler.unary_unary(None, context)  # type: ignore[misc]
    except grpc.aio.AbortError:
        assert context.aborted is not None
    return context, generate_latest(registry).decode()


async def test_a_call_is_a_child_of_its_caller_and_stages_are_children_of_it(traces: Traces) -> None:
    seen = []

    async def work() -> str:
        with stage("admission"):
            seen.append(outgoing())
        assert structlog.contextvars.get_contextvars() == {"trace_id": TRACE}
        assert exemplar() == TRACE
        return "an answer"

    _, metrics = await call(traces.tracer, work)
    spans = traces.spans()
    root, inner = spans["penstock.v1.TextService/Chat"], spans["admission"]
    assert (root["traceId"], root["parentSpanId"], root["kind"], root["traceState"]) == (TRACE, CALLER, 2, "vendor=1")
    assert (inner["traceId"], inner["parentSpanId"], inner["kind"]) == (TRACE, root["spanId"], 1)
    assert attribute(root, "rpc.grpc.status_code") == {"intValue": "0"}
    assert seen == [(("traceparent", f"00-{TRACE}-{inner['spanId']}-01"), ("tracestate", "vendor=1"))]
    assert f'# {{trace_id="{TRACE}"}}' in metrics


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidArgument("field", "is wrong", reason="TOO_MANY"), {"code": 0}),
        (Unavailable("gone", reason="NO_BACKEND"), {"code": 2, "message": "NO_BACKEND"}),
    ],
)
async def test_an_error_has_its_reason_and_is_a_status_where_the_service_is_at_fault(
    traces: Traces, error: PenstockError, status: dict[str, Any]
) -> None:
    async def work() -> str:
        raise error

    context, _ = await call(traces.tracer, work)
    [root] = traces.spans().values()
    assert context.aborted is error.code
    assert attribute(root, "error.type") == {"stringValue": error.reason}
    assert root["status"] == status


async def test_a_trace_that_its_caller_does_not_keep_travels_on_and_leaves_nothing(traces: Traces) -> None:
    seen = []

    async def work() -> str:
        with stage("admission") as span:
            seen.append((span, dict(outgoing())["traceparent"]))
        message = generation_pb2.GenerateRequest()
        assert begin_attempt(message, "gpu:50052", 0) is None
        assert message.traceparent.startswith(f"00-{TRACE}-")
        assert message.traceparent.endswith("-00")
        return "an answer"

    _, metrics = await call(traces.tracer, work, traceparent=NOT_KEPT)
    [(span, traceparent)] = seen
    assert span is None
    assert traceparent.endswith("-00")
    assert traces.spans() == {}
    assert "trace_id" not in metrics


async def test_polls_have_no_span(traces: Traces) -> None:
    async def work() -> str:
        assert current_span.get() is None
        return "an answer"

    await call(traces.tracer, work, method="ListModels")
    assert traces.spans() == {}


async def test_without_a_tracer_a_callers_trace_is_not_looked_at() -> None:
    async def work() -> str:
        message = generation_pb2.GenerateRequest()
        assert begin_attempt(message, "gpu:50052", 0) is None
        assert (current_span.get(), message.traceparent) == (None, "")
        return "an answer"

    await call(None, work)


@pytest.mark.parametrize(("ratio", "kept"), [(0.0, 0), (1.0, 1)])
async def test_a_trace_that_begins_here_is_kept_by_the_ratio(tmp_path: Path, ratio: float, kept: int) -> None:
    traces = Traces(tmp_path / "traces.jsonl", tracing_sample_ratio=ratio)

    async def work() -> str:
        return "an answer"

    await call(traces.tracer, work, traceparent="nonsense")
    assert len(traces.spans()) == kept


async def test_an_attempt_names_its_span_to_the_backend(traces: Traces) -> None:
    message = generation_pb2.GenerateRequest(attempt_epoch=1)

    async def work() -> str:
        span = begin_attempt(message, "gpu:50052", 5)
        assert span is not None
        span.end()
        return "an answer"

    await call(traces.tracer, work)
    attempt = traces.spans()["attempt 2"]
    assert message.traceparent == f"00-{TRACE}-{attempt['spanId']}-01"
    assert message.tracestate == "vendor=1"
    assert attempt["kind"] == 3
    assert attribute(attempt, "server.address") == {"stringValue": "gpu:50052"}
    assert attribute(attempt, "penstock.resumed_tokens") == {"intValue": "5"}


def finished(timings: RequestTimings, error: PenstockError | None = None) -> FinishedOutput:
    """Last word on a request of three prompt tokens."""
    sequences = (SequenceFinish(0, FinishReason.STOP_EOS, 2),) if error is None else ()
    return FinishedOutput(sequences, 3, 2, 1, timings, None, error=error)


def test_stages_of_a_generation_become_spans_at_its_end(traces: Traces) -> None:
    done = request([1, 2, 3], arrival_time=1000.0)
    done.span = begin_in_session(traces.tracer, parse_context(KEPT))
    end_finished(done, "a model", finished(RequestTimings(0.25, 0.5, 1.0, 0.75, 1.75)))
    spans = traces.spans()
    root = spans["generate"]
    begin, end = int(spans["queue"]["startTimeUnixNano"]), int(root["endTimeUnixNano"])
    assert end - begin == pytest.approx(1.75e9, abs=1e6)
    for name, length in (("queue", 0.25e9), ("prefill", 0.5e9), ("decode", 1.0e9)):
        span = spans[name]
        assert int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"]) == pytest.approx(length, abs=1e6)
        assert span["parentSpanId"] == root["spanId"]
    assert root["parentSpanId"] == CALLER
    assert attribute(root, "gen_ai.usage.input_tokens") == {"intValue": "3"}
    assert attribute(root, "gen_ai.response.finish_reasons") == {"arrayValue": {"values": [{"stringValue": "stop"}]}}


@pytest.mark.parametrize(
    ("timings", "names"),
    [
        (RequestTimings(None, None, None, None, 1.0), {"generate", "queue"}),
        (RequestTimings(0.5, None, None, None, 1.0), {"generate", "queue", "prefill"}),
    ],
)
def test_a_generation_that_fails_has_the_stages_that_it_reached(
    traces: Traces, timings: RequestTimings, names: set[str]
) -> None:
    failed = request([1, 2, 3], arrival_time=1000.0)
    failed.span = begin_in_session(traces.tracer, parse_context(KEPT))
    end_finished(failed, "a model", finished(timings, Unavailable("gone", reason="ENGINE_FAILED")))
    spans = traces.spans()
    assert set(spans) == names
    assert spans["generate"]["status"] == {"code": 2, "message": "ENGINE_FAILED"}


def test_a_request_that_is_refused_has_a_span_with_its_reason(traces: Traces) -> None:
    span = begin_in_session(traces.tracer, parse_context(KEPT))
    end_refused(span, InvalidArgument("seed", "is wrong", reason="OUT_OF_RANGE"))
    [refused] = traces.spans().values()
    assert attribute(refused, "error.type") == {"stringValue": "OUT_OF_RANGE"}


@pytest.mark.parametrize("traceparent", ["", NOT_KEPT])
def test_a_request_of_no_kept_trace_has_no_span(traces: Traces, traceparent: str) -> None:
    assert begin_in_session(traces.tracer, parse_context(traceparent)) is None
    end_finished(request([1]), "a model", finished(RequestTimings(0.0, 0.0, 0.0, 0.0, 0.0)))
    assert traces.spans() == {}


def test_a_file_that_is_full_takes_no_more(tmp_path: Path) -> None:
    traces = Traces(tmp_path / "traces.jsonl", tracing_file_bytes=4096)
    traces.path.write_bytes(b"\n" * 4096)
    end_refused(begin_in_session(traces.tracer, parse_context(KEPT)), None)
    traces.tracer.close()
    assert traces.path.stat().st_size == 4096


def test_an_endpoint_must_be_one() -> None:
    with pytest.raises(StartupError) as raised:
        ServerConfig(tracing_endpoint="collector:4318").validate()
    assert raised.value.flag == "--tracing-endpoint"
    with pytest.raises(StartupError, match="No such file"):
        start_tracing(ServerConfig(tracing_endpoint="file:/no/such/folder/traces.jsonl"), "router")
