"""Backends that fail more than others are kept out of use, and come back when they have recovered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from factories.servers.emitting_backend import EmittingBackend, count_up
from factories.servers.held_backend import status_of
from factories.servers.only_route import only_route
from factories.servers.router import PATIENCE_SECONDS, Router, backend, collect, generate, running_router, until
from penstock.common.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)

QUICK = {"eject_seconds": 0.2, "probes": 2}
IDS = list(count_up(8)(None))  # type: ignore[arg-type]


def unavailable() -> Unavailable:
    return Unavailable("no", reason="NO_BACKEND")


def every_second() -> Callable[[Any], PenstockError | None]:
    """Refuse every second request."""
    turn = itertools.count()
    return lambda _: unavailable() if next(turn) % 2 else None


async def ask(router: Router, count: int, width: int) -> int:
    """Send `count` requests, `width` at a time, and return the number of their attempts. Raises a stream's error."""
    attempts, numbers = 0, iter(range(count))

    async def work() -> None:
        nonlocal attempts
        for _ in numbers:
            answer = await collect(router.stub.Generate(generate()))
            attempts += answer.finished.attempts

    await asyncio.gather(*(work() for _ in range(width)))
    return attempts


@pytest.mark.thinned(2)
@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
@pytest.mark.parametrize("width", [1, 16])
async def test_a_backend_that_refuses_half_of_its_requests_costs_nobody_an_answer(
    width: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_TRANSPORT", transport)
    # However slow the machine: all failures are in the window, and no probe comes before the end.
    slow = {"eject_window_seconds": PATIENCE_SECONDS, "eject_seconds": PATIENCE_SECONDS}
    async with backend(refuse=every_second()) as bad, backend() as good, running_router(bad, good, **slow) as router:
        attempts = await ask(router, 200, width)
        assert attempts <= 1.1 * 200
        assert router.metric("backend_ejected", backend=bad.address) == 1
        assert router.metric("backend_ejected", backend=good.address) == 0


async def test_a_backend_that_has_recovered_comes_back() -> None:
    async with backend(refuse=unavailable()) as bad, backend() as good, running_router(bad, good, **QUICK) as router:
        await ask(router, 20, 4)
        assert router.metric("backend_ejected", backend=bad.address) == 1
        bad.refuse = None
        good.extra_load = 100
        app: Any = router.server.service
        await until(lambda: any(one.load.requests >= 100 for one in only_route(app).pool.backends))
        while router.metric("backend_ejected", backend=bad.address):
            await ask(router, 1, 1)
        before = len(bad.submitted)
        assert await ask(router, 5, 1) == 5
        assert len(bad.submitted) == before + 5


async def test_a_backend_that_still_fails_costs_one_request_each_time() -> None:
    settings = {**QUICK, "eject_seconds": 0.05}
    async with backend(refuse=unavailable()) as bad, backend() as good, running_router(bad, good, **settings) as router:
        while router.metric("backend_ejections_total", backend=bad.address, cause="probe") < 2:
            await ask(router, 1, 1)
        assert len(bad.submitted) == router.metric("backend_failures_total", backend=bad.address, kind="unavailable")
        # At most one beside those that ejected it: no probe comes before the last one's end.
        assert len(bad.submitted) <= 5 + 2 + 1


async def test_a_probe_without_an_answer_keeps_nobody_waiting_for_the_next() -> None:
    settings = {**QUICK, "probe_timeout_seconds": 0.1}
    async with backend(refuse=unavailable()) as bad, backend() as good, running_router(bad, good, **settings) as router:
        await ask(router, 20, 4)
        bad.refuse, bad.forgets = None, True
        probes = [asyncio.ensure_future(collect(router.stub.Generate(generate())))]
        before = len(bad.submitted)
        while len(bad.submitted) == before:
            probes.append(asyncio.ensure_future(collect(router.stub.Generate(generate()))))
            await asyncio.wait(probes, return_when=asyncio.FIRST_COMPLETED)
        while not router.metric("backend_ejections_total", backend=bad.address, cause="probe"):
            await ask(router, 1, 1)
        bad.forgets = False
        while router.metric("backend_ejected", backend=bad.address):
            await ask(router, 1, 1)
        for probe in probes:
            probe.cancel()


async def test_a_backend_whose_every_request_breaks_before_its_first_token_is_ejected() -> None:
    broken = Internal("no numbers", reason="MODEL_OUTPUT_NAN")
    slow = {"eject_window_seconds": PATIENCE_SECONDS}
    async with (
        backend(refuse=broken) as bad,
        backend(extra_load=100) as good,
        running_router(bad, good, **slow) as router,
    ):
        for _ in range(10):
            assert (await status_of(router.stub.Generate(generate())))[1].reason == "MODEL_OUTPUT_NAN"
        assert router.metric("backend_ejections_total", backend=bad.address, cause="share") == 1
        assert await ask(router, 3, 1) == 3


async def test_a_new_process_is_ejected_no_more_and_shown_so() -> None:
    settings = {"eject_seconds": 3600.0, "eject_max_seconds": 3600.0}
    async with backend(refuse=unavailable()) as bad, backend() as good, running_router(bad, good, **settings) as router:
        await ask(router, 20, 4)
        assert router.metric("backend_ejected", backend=bad.address) == 1
        bad.refuse = None
        await bad.stop()
        await bad.start()
        await router.until("backend_ejected", 0, backend=bad.address)


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
async def test_a_backend_that_ends_what_would_be_late_before_its_deadline_is_no_liar(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_TRANSPORT", transport)
    late = DeadlineExceeded("late", reason="DEADLINE_EXCEEDED", metadata={"stage": "queue"})
    async with backend(refuse=late) as one, backend(extra_load=100) as two, running_router(one, two) as router:
        for _ in range(12):
            code, error = await status_of(router.stub.Generate(generate(), timeout=3600))
            assert (code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        assert (len(one.submitted), len(two.submitted)) == (12, 0)
        assert router.metric("backend_ejected", backend=one.address) == 0


async def test_the_last_backend_is_never_ejected() -> None:
    settings: dict[str, Any] = {"max_attempts": 1}
    async with backend(refuse=unavailable()) as only, running_router(only, **settings) as router:
        for _ in range(20):
            await status_of(router.stub.Generate(generate()))
        assert router.metric("backend_ejected", backend=only.address) == 0
        only.refuse = None
        assert (await collect(router.stub.Generate(generate()))).finished


async def test_an_ejected_backend_serves_when_the_others_are_gone() -> None:
    async with backend(refuse=unavailable()) as bad, backend() as good, running_router(bad, good) as router:
        await ask(router, 20, 4)
        bad.refuse = None
        await good.stop()
        await router.until("backend_up", 0, backend=good.address)
        assert await ask(router, 3, 1) == 3


@pytest.mark.parametrize(
    "error",
    [InvalidArgument("config.top_p", "no"), ResourceExhausted("full", reason="QUEUE_FULL", retry_after_seconds=1.0)],
    ids=["INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"],
)
async def test_refusals_for_the_requests_own_sake_never_count(error: PenstockError) -> None:
    def ready(one: EmittingBackend) -> EmittingBackend:
        one.refuse = error
        return one

    async with ready(backend()) as one, backend(extra_load=100) as two, running_router(one, two) as router:
        for _ in range(30):
            await status_of(router.stub.Generate(generate()))
        assert len(one.submitted) == 30
        assert router.metric("backend_ejected", backend=one.address) == 0
