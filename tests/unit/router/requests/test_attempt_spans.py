"""The span of an attempt ends with the attempt, whatever ends that, and says why."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from penstock.common.errors import Internal, PenstockError, Unavailable
from penstock.common.tracing import Attributes, Span, SpanKind, TraceContext
from penstock.router.backends.session import BackendSession
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.request_state import Loss, RequestSpec, RequestState, Timings
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.v1 import generation_pb2, tokenizer_pb2
from prometheus_client import CollectorRegistry


class NotedSpan(Span):
    """Span that notes its failure and its end."""

    def __init__(self) -> None:
        self.context = TraceContext("a" * 32, "b" * 16, True)
        self.failure: tuple[str, bool] | None = None
        self.ends = 0

    def start(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        begin: float | None = None,
    ) -> Span:
        return NotedSpan()

    def set(self, attributes: Attributes) -> None:
        pass

    def fail(self, reason: str, *, is_fault: bool = True) -> None:
        self.failure = reason, is_fault

    def end(self, at: float | None = None) -> None:
        self.ends += 1


def attempt() -> tuple[BackendSession, RequestState, NotedSpan]:
    """A request that a backend has, with the span of that attempt."""
    metrics, detokenizer = RouterMetrics(CollectorRegistry()), Detokenizer(max_outstanding=1)
    call: Any = None
    session = BackendSession(call, "backend", detokenizer, metrics)
    request = generation_pb2.GenerateRequest(request_id="a")
    spec = RequestSpec("a", request, num_sequences=1, decode_options=tokenizer_pb2.DecodeStreamOpen())
    state = RequestState(spec, Timings(asyncio.get_running_loop().time()), detokenizer.drop, metrics, 1 << 20)
    session.submit(state, generation_pb2.SessionRequest(submit=request))
    span = NotedSpan()
    state.attempt_span = span
    return session, state, span


async def test_a_lost_backend_ends_the_span_once_and_the_next_attempt_has_its_own() -> None:
    session, state, first = attempt()
    session.lose()
    assert (first.failure, first.ends) == (("BACKEND_LOST", True), 1)
    second = NotedSpan()
    state.attempt_span = second
    state.on_backend_finished(None)
    assert (second.failure, second.ends, first.ends) == (None, 1, 1)


async def test_a_loss_with_an_error_has_its_reason() -> None:
    _, state, span = attempt()
    state.on_lost(Loss(Unavailable("full", reason="QUEUE_FULL"), "backend"))
    assert (span.failure, span.ends) == (("QUEUE_FULL", True), 1)


@pytest.mark.parametrize(
    ("error", "failure"),
    [(Internal("broke", reason="INTERNAL"), ("INTERNAL", True)), (None, ("CANCELLED", False))],
    ids=["failed", "the reader went"],
)
async def test_a_stream_that_ends_early_ends_its_attempt(
    error: PenstockError | None, failure: tuple[str, bool]
) -> None:
    _, state, span = attempt()
    if error is not None:
        state.fail(error)
    state.close()
    assert (span.failure, span.ends) == (failure, 1)
