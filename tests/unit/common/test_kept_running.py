"""Work beside requests: a fault is told at once, and is not the end of it."""

from __future__ import annotations

import asyncio

import pytest
from penstock.common.kept_running import kept_running
from penstock.common.logging import get_logger
from structlog.testing import capture_logs

LOG = get_logger("penstock.test")


async def test_work_begins_anew_after_each_fault_and_the_log_has_them_by_then() -> None:
    told: list[int] = []
    with capture_logs() as lines:

        async def work() -> None:
            told.append(len(lines))
            if len(told) < 3:
                raise RuntimeError("a fault")

        await kept_running(work, LOG, "the test's", 0.0)
    assert told == [0, 1, 2]
    assert [(line["work"], line["log_level"]) for line in lines] == [("the test's", "error")] * 2


async def test_it_is_cancelled_at_work_and_between_two_runs() -> None:
    begun = asyncio.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def fail() -> None:
        begun.set()
        raise RuntimeError("a fault")

    for work in (wait, fail):
        begun.clear()
        task = asyncio.create_task(kept_running(work, LOG, "the test's", 3600.0))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
