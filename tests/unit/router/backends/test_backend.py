"""Calls with a single answer at one backend: a lost connection or a broken step is noted with who was there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from penstock.common.errors import Internal, Unavailable, to_status, trailing_metadata
from penstock.http2.client_connection import rpc_error
from penstock.router.backends.backend import Backend
from penstock.router.backends.crash_log import CrashLog
from penstock.router.backends.discovery import BackendAddress
from penstock.router.backends.load_report import LoadReport
from penstock.router.backends.outliers import Outcome, Probe
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.suspect import Suspect
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.v1 import tokenizer_pb2
from prometheus_client import CollectorRegistry


class Outliers:
    """It only notes what it is told."""

    def __init__(self) -> None:
        self.noted: list[Outcome] = []

    def note(self, _: str, outcome: Outcome, probe: Probe | None = None, *, has_begun: bool = False) -> None:
        self.noted.append(outcome)


class Connected:
    """A ready backend without a process behind it."""

    def __init__(self) -> None:
        self.outliers: Any = Outliers()
        self.backend: Any = Backend(
            BackendAddress("127.0.0.1:1", "a:1"),
            RouterConfig(death_verdict_seconds=1000.0),
            Detokenizer(max_outstanding=1),
            RouterMetrics(CollectorRegistry()),
            tokenizer=tokenizer_pb2.GetTokenizerResponse,
            on_change=lambda: None,
            on_kept=lambda backend, names: None,
            crashes=CrashLog(lambda: None),
            outliers=self.outliers,
        )
        self.backend.link.show(takes_work=True)
        self.backend._connection = SimpleNamespace(calls=object())

    async def call(self, error: grpc.aio.AioRpcError, suspect: Suspect) -> None:
        """Make a call that fails by `error`."""

        async def fail(*_: Any) -> None:
            raise error

        with pytest.raises(Unavailable):
            await self.backend.call(fail, (), None, suspect)


def broken() -> grpc.aio.AioRpcError:
    return rpc_error(grpc.StatusCode.UNAVAILABLE, "hung up on")


def step_failed() -> grpc.aio.AioRpcError:
    error = Internal("broke", reason="STEP_FAILED")
    details = ("grpc-status-details-bin", to_status(error).SerializeToString())
    assert details in trailing_metadata(error)
    return rpc_error(grpc.StatusCode.INTERNAL, "broke", (details,))


@pytest.mark.parametrize("error", [broken(), step_failed()], ids=["its connection ends", "a step of it breaks"])
async def test_a_loss_counts_once_however_many_calls_it_takes_with_it(error: grpc.aio.AioRpcError) -> None:
    connected, callers = Connected(), [Suspect(0.0) for _ in range(7)]
    for caller in callers:
        await connected.call(error, caller)
    assert connected.outliers.noted == [Outcome.LOST]
    assert {len(caller.crashes) for caller in callers} == {1}
    assert len({caller.crashes[0] for caller in callers}) == 1
    assert connected.backend.in_flight == 0


async def test_of_a_broken_step_only_those_in_it_may_be_the_cause() -> None:
    connected, culprit, beside = Connected(), Suspect(0.0), Suspect(0.0)
    connected.backend._callers.append(beside)
    await connected.call(step_failed(), culprit)
    await connected.call(broken(), Suspect(0.0))
    assert ([crash.is_confirmed for crash in culprit.crashes], beside.crashes) == ([None], [])


async def test_calls_of_idle_capacity_are_not_waited_for_by_others() -> None:
    backend, may_end = Connected().backend, asyncio.Event()
    backend.load.take(LoadReport(idle_only_requests=0))

    async def wait(*_: Any) -> None:
        await may_end.wait()

    calls = [
        asyncio.ensure_future(backend.call(wait, (), None, Suspect(0.0), is_idle_only=is_idle_only))
        for is_idle_only in (True, True, False)
    ]
    await asyncio.sleep(0)
    assert (backend.load.requests, backend.load.pressing) == (3, 1)
    may_end.set()
    await asyncio.gather(*calls)
    assert (backend.load.requests, backend.load.pressing) == (0, 0)
