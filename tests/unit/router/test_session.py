"""Messages of a backend's Session that break the protocol, and those of an engine that broke."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.common.errors import Internal, Unavailable, to_status
from penstock.router.backends.session import FORGOTTEN_LOOKS, BackendSession
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.request_state import RequestSpec, RequestState, Timings
from penstock.router.requests.suspect import Suspect
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.v1 import generation_pb2, tokenizer_pb2
from prometheus_client import CollectorRegistry

# Suspects of broken steps, as the session tells of them.
BLAMED: list[Suspect] = []


def session_with(*names: str) -> tuple[BackendSession, list[RequestState]]:
    """A session without a stream, and the requests that it holds."""
    metrics, detokenizer = RouterMetrics(CollectorRegistry()), Detokenizer(max_outstanding=1)
    call: Any = None
    session = BackendSession(call, "backend", detokenizer, metrics, BLAMED.append)
    states = []
    for name in names:
        request = generation_pb2.GenerateRequest(request_id=name)
        spec = RequestSpec(name, request, num_sequences=1, decode_options=tokenizer_pb2.DecodeStreamOpen())
        states.append(
            RequestState(spec, Timings(asyncio.get_running_loop().time()), detokenizer.drop, metrics, 1 << 20)
        )
        session.submit(states[-1], generation_pb2.SessionRequest(submit=request))
    return session, states


async def test_requests_of_a_broken_step_move_and_those_in_it_are_told_of_the_death() -> None:
    BLAMED.clear()
    session, (culprit, beside, waiting) = session_with("a", "b", "c")
    message = generation_pb2.SessionResponse()
    for name, error in (
        ("a", Internal("broke", reason="STEP_FAILED")),
        ("b", Internal("broke", reason="STEP_FAILED")),
        ("c", Unavailable("broke", reason="ENGINE_FAILED")),
    ):
        status = to_status(error)
        told = generation_pb2.RequestError(code=status.code, status_details=status.SerializeToString())
        message.events.add(request_id=name, error=told)
    session._take(message)
    assert [state.error for state in (culprit, beside, waiting)] == [None, None, None]
    assert [state.loss is not None for state in (culprit, beside, waiting)] == [True, True, True]
    assert [culprit.suspect, beside.suspect] == BLAMED


async def test_a_heartbeat_is_a_sign_of_life_and_nothing_else() -> None:
    session, (state,) = session_with("a")
    session._take(generation_pb2.SessionResponse(step=3, heartbeat=True))
    assert (session.frames, session.in_flight, state.loss, state.error) == (1, 1, None, None)


async def test_a_session_that_is_silent_has_forgotten_nothing() -> None:
    """A connection may have gone dark while its backend, which has ended the request, reports that it has none."""
    session, (state,) = session_with("a")
    for _ in range(2 * FORGOTTEN_LOOKS):
        session.look_for_forgotten(known=0)
    assert state.loss is None
    for _ in range(FORGOTTEN_LOOKS):
        session._take(generation_pb2.SessionResponse(heartbeat=True))
        session.look_for_forgotten(known=0)
    assert state.loss is not None


async def test_an_error_with_a_broken_status_costs_its_request_that_backend_and_no_other() -> None:
    session, (broken, other) = session_with("a", "b")
    error = generation_pb2.RequestError(code=13, message="no", status_details=b"\xff")
    event = generation_pb2.SessionEvent(request_id="a", error=error)
    session._take(generation_pb2.SessionResponse(events=[event]))
    assert broken.loss is not None
    assert broken.loss.error is not None
    assert broken.loss.error.reason == "BACKEND_PROTOCOL"
    assert (other.loss, other.error, session.in_flight) == (None, None, 1)
