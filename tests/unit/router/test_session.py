"""Messages of a backend's Session that break the protocol."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.router.backends.session import BackendSession
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.request_state import RequestSpec, RequestState, Timings
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.v1 import generation_pb2, tokenizer_pb2
from prometheus_client import CollectorRegistry


async def test_an_error_with_a_broken_status_costs_its_request_that_backend_and_no_other() -> None:
    metrics, detokenizer = RouterMetrics(CollectorRegistry()), Detokenizer(max_outstanding=1)
    call: Any = None
    session = BackendSession(call, "backend", detokenizer, metrics, lambda: None)
    states = []
    for name in ("a", "b"):
        request = generation_pb2.GenerateRequest(request_id=name)
        spec = RequestSpec(name, request, num_sequences=1, decode_options=tokenizer_pb2.DecodeStreamOpen())
        states.append(
            RequestState(spec, Timings(asyncio.get_running_loop().time()), detokenizer.drop, metrics, 1 << 20)
        )
        session.submit(states[-1], generation_pb2.SessionRequest(submit=request))
    error = generation_pb2.RequestError(code=13, message="no", status_details=b"\xff")
    event = generation_pb2.SessionEvent(request_id="a", error=error)
    session._take(generation_pb2.SessionResponse(events=[event]))
    broken, other = states
    assert broken.loss is not None
    assert broken.loss.error is not None
    assert broken.loss.error.reason == "BACKEND_PROTOCOL"
    assert (other.loss, other.error, session.in_flight) == (None, None, 1)
