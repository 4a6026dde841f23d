"""Log lines about the process: a state that was asked for is a warning, a fault ends no line but its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from factories.engine.fake_engine import FakeRunner, engine_config, request
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.loop import EngineLoop
from penstock.generation.engine.status_log import StatusLog
from structlog.testing import capture_logs


@pytest.fixture
async def idle() -> AsyncIterator[StatusLog]:
    """Log of an engine without work, with a line every few milliseconds."""
    runner = FakeRunner(engine_config())
    engine = Engine(runner.config, runner, None)
    loop = EngineLoop(engine, asyncio.get_running_loop(), lambda *_: None, lambda _: None)
    loop.start()
    status = StatusLog(loop, engine.stats, 0.005)
    yield status
    status.stop()
    await asyncio.to_thread(loop.stop)


async def test_a_state_that_was_asked_for_is_a_warning(idle: StatusLog) -> None:
    with capture_logs() as logs:
        idle.dump_soon()
        assert idle._dumping is not None
        await idle._dumping
    assert [(log["event"], log["log_level"]) for log in logs] == [("engine state", "warning")]


async def test_a_line_that_fails_is_told_and_the_next_ones_follow(
    idle: StatusLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, calls, went_on = StatusLog._report, 0, asyncio.Event()

    def broken_once(log: StatusLog, before: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        went_on.set()
        return report(log, before)

    monkeypatch.setattr(StatusLog, "_report", broken_once)
    with capture_logs() as logs:
        idle.start()
        await asyncio.wait_for(went_on.wait(), 60)
    assert [(log["event"], log["log_level"]) for log in logs] == [("no status line", "error")]


async def test_a_line_tells_of_a_pause(idle: StatusLog) -> None:
    """Requests without steps would look like a hang."""
    loop = idle._loop
    await asyncio.wrap_future(loop.pause(1, 600.0))
    loop.submit(request([1], max_new_tokens=2))
    before = idle._totals()
    await asyncio.sleep(0.01)
    with capture_logs() as logs:
        idle._report(before)
    assert [(log["queued"], log["steps"], log["paused"]) for log in logs] == [(1, 0, True)]
    await asyncio.wrap_future(loop.resume())
    await asyncio.wrap_future(loop.run_on_engine(lambda _: None))
    with capture_logs() as logs:
        idle._report(before)
    assert "paused" not in logs[0]
