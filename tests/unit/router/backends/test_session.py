"""Messages of a backend's Session that break the protocol, those of an engine that broke, and what is told of both."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from penstock.common.errors import DeadlineExceeded, Internal, PenstockError, Unavailable, to_status
from penstock.router.backends.outliers import Outcome
from penstock.router.backends.session import FORGOTTEN_LOOKS, BackendSession
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.request_state import RequestSpec, RequestState, Timings
from penstock.router.requests.suspect import Suspect
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.v1 import generation_pb2, tokenizer_pb2
from prometheus_client import CollectorRegistry

# Suspects of broken steps, as the session tells of them.
BLAMED: list[Suspect] = []
# Outcomes that it tells of, and True for those of attempts that had begun.
OUTCOMES: list[tuple[Outcome, bool]] = []


def note(outcome: Outcome, _: Any, has_begun: bool) -> None:
    OUTCOMES.append((outcome, has_begun))


def session_with(*names: str, budget: int = 100) -> tuple[BackendSession, list[RequestState]]:
    """A session without a stream, and the requests that it holds."""
    OUTCOMES.clear()
    metrics, detokenizer = RouterMetrics(CollectorRegistry()), Detokenizer(max_outstanding=1)
    call: Any = None
    session = BackendSession(call, "backend", detokenizer, metrics, BLAMED.append, on_outcome=note)
    states = []
    for name in names:
        request = generation_pb2.GenerateRequest(request_id=name)
        request.config.max_new_tokens = budget
        spec = RequestSpec(name, request, num_sequences=1, decode_options=tokenizer_pb2.DecodeStreamOpen())
        states.append(
            RequestState(spec, Timings(asyncio.get_running_loop().time()), detokenizer.drop, metrics, 1 << 20)
        )
        session.submit(states[-1], generation_pb2.SessionRequest(submit=request))
    return session, states


async def test_requests_of_a_broken_step_move_and_those_in_it_are_told_of_the_crash() -> None:
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


async def test_a_request_counts_as_forgotten_only_while_the_session_has_messages() -> None:
    """Silence is judged by itself: it may be the connection's, and then nobody lied."""
    session, (state,) = session_with("a")
    for reports in range(3 * FORGOTTEN_LOOKS):
        session.look_for_forgotten(known=0, reports=reports)
    assert (state.loss, session.in_flight) == (None, 1)
    for reports in range(100, 101 + FORGOTTEN_LOOKS):
        assert state.loss is None
        session._take(generation_pb2.SessionResponse(heartbeat=True))
        session.look_for_forgotten(known=0, reports=reports)
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


def failed(session: BackendSession, name: str, error: PenstockError) -> None:
    """Let the session read that a request ended with `error`."""
    status = to_status(error)
    told = generation_pb2.RequestError(code=status.code, status_details=status.SerializeToString())
    event = generation_pb2.SessionEvent(request_id=name, error=told)
    session._take(generation_pb2.SessionResponse(events=[event]))


def begun(session: BackendSession, name: str) -> None:
    """Let the session read that a request has begun."""
    event = generation_pb2.SessionEvent(request_id=name, started=generation_pb2.Started(request_id=name))
    session._take(generation_pb2.SessionResponse(events=[event]))


async def test_an_error_whose_details_are_noise_costs_its_request_that_backend_and_no_other() -> None:
    session, (broken, other) = session_with("a", "b")
    noise = any_pb2.Any()
    noise.Pack(error_details_pb2.ErrorInfo())
    noise.value = b"\xff"
    details = status_pb2.Status(code=14, details=[noise]).SerializeToString()
    error = generation_pb2.RequestError(code=14, message="no", status_details=details)
    session._take(generation_pb2.SessionResponse(events=[generation_pb2.SessionEvent(request_id="a", error=error)]))
    assert broken.loss is not None
    assert broken.loss.error is not None
    assert broken.loss.error.reason == "BACKEND_PROTOCOL"
    assert (other.loss, session.in_flight) == (None, 1)


@pytest.mark.parametrize(("has_begun", "has_deadline", "is_lie"), [(0, 1, 0), (1, 1, 1), (0, 0, 1), (1, 0, 1)])
async def test_a_request_that_waits_may_be_late_before_its_deadline_and_no_other(
    has_begun: bool, has_deadline: bool, is_lie: bool
) -> None:
    """The generation service ends what waits as soon as it cannot end in time any more."""
    session, (state,) = session_with("a")
    state.timings.deadline = time.monotonic() + 1000.0 if has_deadline else None
    if has_begun:
        begun(session, "a")
    failed(session, "a", DeadlineExceeded("late", reason="DEADLINE_EXCEEDED", metadata={"stage": "queue"}))
    assert (state.error is None) == is_lie
    assert (state.loss is not None) == is_lie
    outcome = Outcome.PROTOCOL if is_lie else Outcome.NEUTRAL
    assert (outcome, has_begun) in OUTCOMES


async def test_failures_are_told_with_what_came_before_them() -> None:
    session, _ = session_with("a", "b")
    begun(session, "a")
    for name in ("a", "b"):
        failed(session, name, Internal("no", reason="MODEL_OUTPUT_NAN"))
    assert OUTCOMES == [(Outcome.STARTED, True), (Outcome.INTERNAL, True), (Outcome.INTERNAL, False)]


async def test_a_request_counts_as_forgotten_only_by_a_report_that_came_since() -> None:
    session, (state,) = session_with("a")
    for _ in range(3 * FORGOTTEN_LOOKS):
        session._take(generation_pb2.SessionResponse(heartbeat=True))
        session.look_for_forgotten(known=0, reports=7)
    assert state.loss is None
    for _ in range(FORGOTTEN_LOOKS):
        session._take(generation_pb2.SessionResponse(heartbeat=True))
        session.look_for_forgotten(known=0, reports=8)
    assert state.loss is not None


@pytest.mark.parametrize("before", [0, 3])
async def test_rows_and_deltas_share_one_budget(before: int) -> None:
    session, (state,) = session_with("a", budget=8 + before)
    state.sequence(0).token_ids += range(before)
    begun(session, "a")

    def rows(*seqs: int) -> None:
        rows = generation_pb2.SessionTokens(handles=[1] * len(seqs), seqs=seqs, token_ids=[7] * len(seqs))
        session._take(generation_pb2.SessionResponse(events=[generation_pb2.SessionEvent(tokens=rows)]))

    rows(0, 1)
    delta = generation_pb2.TokenDelta(seq=2, token_ids=[8] * 3)
    event = generation_pb2.SessionEvent(request_id="a", delta=delta)
    session._take(generation_pb2.SessionResponse(events=[event]))
    rows(3, 4, 5)
    assert state.sequence(0).token_ids[before:] == [7, 7, 8, 8, 8, 7, 7, 7]
    assert state.loss is None
    rows(6)
    assert len(state.sequence(0).token_ids) == 8 + before
    assert state.loss is not None
    assert (Outcome.PROTOCOL, True) in OUTCOMES
