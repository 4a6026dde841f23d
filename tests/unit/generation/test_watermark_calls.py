"""DetectWatermark on another thread: one at a time, bounded, and ended with its caller."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from penstock.common.errors import DeadlineExceeded, ResourceExhausted
from penstock.generation.options.detect_watermark import DetectWatermarkCommand
from penstock.generation.sampling.watermark_detector import WatermarkDetector
from penstock.generation.service import WatermarkCalls

COMMAND = DetectWatermarkCommand([1, 2, 3])


class Held:
    """A detector that works until it is let go or told to stop."""

    def __init__(self) -> None:
        self.began, self.let_go, self.ended = threading.Event(), threading.Event(), threading.Event()

    def detect(self, _: Any, *, z_threshold: float, check: Callable[[], None]) -> str:
        self.began.set()
        try:
            while not self.let_go.wait(0.001):
                check()
            return "evidence"
        finally:
            self.ended.set()


def run(calls: WatermarkCalls, detector: Held, deadline: float | None = None) -> asyncio.Task[Any]:
    return asyncio.ensure_future(calls.run(cast("WatermarkDetector", detector), COMMAND, deadline))


async def wait(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 10)


async def test_the_next_call_waits_for_the_one_before() -> None:
    calls, first, second = WatermarkCalls(2, 2.5), Held(), Held()
    one, two = run(calls, first), run(calls, second)
    await wait(first.began)
    assert not second.began.is_set()
    first.let_go.set()
    second.let_go.set()
    assert [await one, await two] == ["evidence", "evidence"]


async def test_more_calls_than_the_bound_are_refused_and_leave_no_trace() -> None:
    calls, held = WatermarkCalls(1, 2.5), Held()
    one = run(calls, held)
    await wait(held.began)
    with pytest.raises(ResourceExhausted) as refused:
        await run(calls, Held())
    assert refused.value.retry_after_seconds == 2.5
    held.let_go.set()
    assert await one == "evidence"
    another = Held()
    another.let_go.set()
    assert await run(calls, another) == "evidence"


async def test_a_deadline_stops_the_work() -> None:
    calls, held = WatermarkCalls(1, 2.5), Held()
    with pytest.raises(DeadlineExceeded):
        await run(calls, held, time.monotonic() + 0.05)
    await wait(held.ended)


async def test_a_deadline_counts_while_a_call_waits() -> None:
    calls, held, waiting = WatermarkCalls(2, 2.5), Held(), Held()
    one = run(calls, held)
    await wait(held.began)
    with pytest.raises(DeadlineExceeded):
        await run(calls, waiting, time.monotonic() + 0.05)
    held.let_go.set()
    assert await one == "evidence"
    assert not waiting.began.is_set()


async def test_a_caller_that_is_gone_stops_the_work() -> None:
    calls, held = WatermarkCalls(1, 2.5), Held()
    one = run(calls, held)
    await wait(held.began)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    await wait(held.ended)
