"""Doubts and losses of one backend's connection: one loss is one, and an end that was told of is one death."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from penstock.common.errors import Internal, Unavailable, to_status, trailing_metadata
from penstock.http2.client_connection import rpc_error
from penstock.router.backends.backend import Backend, BackendAddress, BackendState
from penstock.router.backends.deaths import Blame, Deaths
from penstock.router.backends.outliers import Outcome, Probe
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.suspect import Suspect
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.v1 import admin_pb2
from prometheus_client import CollectorRegistry

VERDICT_SECONDS = 1000.0


class Outliers:
    """It only notes what it is told."""

    def __init__(self) -> None:
        self.noted: list[Outcome] = []
        self.of_probes: list[Outcome] = []

    def note(self, _: str, outcome: Outcome, probe: Probe | None = None, *, has_begun: bool = False) -> None:
        (self.noted if probe is None else self.of_probes).append(outcome)

    def forget(self, _: str) -> None:
        self.noted.clear()

    def half_open(self, _: str) -> None:
        """Nobody is ejected."""


class Connected:
    """A ready backend without a process behind it."""

    def __init__(self) -> None:
        self.deaths = Deaths(lambda: None)
        self.outliers: Any = Outliers()
        metrics = RouterMetrics(CollectorRegistry())
        self.backend: Any = Backend(
            BackendAddress("127.0.0.1:1", "a:1"),
            RouterConfig(death_verdict_seconds=VERDICT_SECONDS),
            Detokenizer(max_outstanding=1),
            metrics,
            tokenizer_fingerprint=str,
            on_change=lambda: None,
            deaths=self.deaths,
            outliers=self.outliers,
        )
        self.backend.state = BackendState.READY
        self.backend._stub = self.backend._session = Session()
        self.backend._has_report = True

    async def call(self, error: grpc.aio.AioRpcError, suspect: Suspect, probe: Probe | None = None) -> None:
        """Make a call that fails by `error`."""

        async def fail(*_: Any) -> None:
            raise error

        with pytest.raises(Unavailable):
            await self.backend.call(fail, (), None, suspect, probe)


class Session:
    """A session without requests."""

    in_flight = 0

    def suspects(self) -> list[Suspect]:
        return []


def broken() -> grpc.aio.AioRpcError:
    return rpc_error(grpc.StatusCode.UNAVAILABLE, "hung up on")


def step_failed() -> grpc.aio.AioRpcError:
    error = Internal("broke", reason="STEP_FAILED")
    details = ("grpc-status-details-bin", to_status(error).SerializeToString())
    assert details in trailing_metadata(error)
    return rpc_error(grpc.StatusCode.INTERNAL, "broke", (details,))


@pytest.fixture
async def connected() -> Connected:
    return Connected()


@pytest.mark.parametrize("error", [broken(), step_failed()], ids=["its connection ends", "a step of it breaks"])
async def test_a_loss_counts_once_however_many_calls_it_takes_with_it(
    connected: Connected, error: grpc.aio.AioRpcError
) -> None:
    for _ in range(7):
        await connected.call(error, Suspect(0.0))
    assert connected.outliers.noted.count(Outcome.LOST) == 1
    connected.backend._lost_at -= VERDICT_SECONDS
    await connected.call(error, Suspect(0.0))
    assert connected.outliers.noted.count(Outcome.LOST) == 2


async def test_every_probe_that_is_lost_has_failed(connected: Connected) -> None:
    for _ in range(2):
        await connected.call(broken(), Suspect(0.0), Probe(0.0))
    assert connected.outliers.of_probes == [Outcome.LOST, Outcome.LOST]


async def test_a_connection_that_ends_and_its_engines_last_word_are_one_death(connected: Connected) -> None:
    """Of calls that end together some may be read before the one that tells why."""
    culprit, beside = Suspect(0.0), Suspect(0.0)
    connected.backend._callers.append(culprit)
    await connected.call(broken(), beside)
    connected.backend._callers.remove(culprit)
    await connected.call(step_failed(), culprit)
    # Another process reports.
    connected.backend._has_report, connected.backend._start_id = False, "one"
    connected.backend._take_report(admin_pb2.Load(process_start_id="two"))
    assert [len([one for one in who.deaths if one.is_death]) for who in (culprit, beside)] == [1, 0]
    assert connected.deaths.blame(culprit) is Blame.SUSPECTED


async def test_a_process_that_told_of_its_end_and_lives_on_is_doubted_again(connected: Connected) -> None:
    first, later = Suspect(0.0), Suspect(0.0)
    await connected.call(step_failed(), first)
    (told,) = first.deaths
    connected.backend._judge_by_time(told)
    assert told.is_death is False
    await connected.call(broken(), later)
    assert [one.is_death for one in later.deaths] == [None]


async def test_a_process_that_told_of_its_end_and_takes_no_work_is_dead(connected: Connected) -> None:
    suspect = Suspect(0.0)
    await connected.call(step_failed(), suspect)
    connected.backend.state = BackendState.DRAINING
    connected.backend._judge_by_time(suspect.deaths[0])
    assert suspect.deaths[0].is_death
