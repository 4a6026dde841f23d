"""The watchdog: heartbeats while the engine gets on, an alarm when a step hangs, nothing while nobody waits."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.generation.delivery.watchdog import Watchdog
from penstock.generation.engine.step_watch import StepView
from structlog.testing import capture_logs


class Loop:
    """Engine's loop whose step is what the test says."""

    is_paused = False

    def __init__(self) -> None:
        self.step_in_progress = StepView()
        self.forgiven = list[float]()

    def forgive_step(self, seconds: float) -> None:
        self.forgiven.append(seconds)

    async def dump(self, wait_seconds: float | None = None) -> Any:
        raise KeyError("a request with its prompt")


class Hub:
    """Hub that counts what it is told."""

    def __init__(self) -> None:
        self.beats = self.notified = self.waits = 0
        self.busy = asyncio.Event()

    async def wait_busy(self) -> None:
        self.waits += 1
        await self.busy.wait()

    def beat(self) -> None:
        self.beats += 1

    def notify(self) -> None:
        self.notified += 1


class Bench:
    def __init__(self) -> None:
        self.loop, self.hub, self.changes = Loop(), Hub(), list[bool]()
        self.slept = asyncio.Semaphore(0)
        self.now = 0.0
        self.watchdog = Watchdog(
            self.loop,
            self.hub,  # type: ignore[arg-type]
            0.25,
            self._change,
            self._sleep,
            lambda: self.now,
        )

    async def _change(self, hung: bool) -> None:
        self.changes.append(hung)

    async def _sleep(self, seconds: float) -> None:
        assert seconds == 0.25
        await self.slept.acquire()

    async def look(self, **view: Any) -> None:
        self.loop.step_in_progress = StepView(**view)
        await self.watchdog.look()


async def test_a_pause_is_told_at_every_look() -> None:
    """A router takes a backend without reports, but with calls, for lost."""
    bench = Bench()
    await bench.look()
    assert (bench.hub.beats, bench.hub.notified) == (1, 0)
    bench.loop.is_paused = True
    await bench.look()
    await bench.look()
    assert (bench.hub.beats, bench.hub.notified) == (3, 2)


async def test_sessions_are_told_of_progress_and_not_of_a_step_that_is_overdue() -> None:
    bench = Bench()
    await bench.look()
    await bench.look(seconds=5.0, began=1.0)
    assert bench.hub.beats == 2
    await bench.look(seconds=6.0, began=1.0, is_overdue=True)
    assert bench.hub.beats == 2
    assert bench.changes == [], "overdue is not hung"


async def test_the_alarm_is_raised_and_ends_with_the_step() -> None:
    bench = Bench()
    for _ in range(3):
        await bench.look(seconds=11.0, began=1.0, is_overdue=True, is_hung=True)
    assert bench.changes == [True]
    await bench.look(seconds=0.1, began=12.0)
    await bench.look()
    assert bench.changes == [True, False]


async def test_the_alarm_goes_out_without_a_state_and_tells_no_text_of_the_error() -> None:
    bench = Bench()
    with capture_logs() as records:
        for _ in range(2):
            await bench.look(seconds=11.0, began=1.0, is_overdue=True, is_hung=True)
    (alarm,) = [record for record in records if record["log_level"] == "error"]
    assert alarm["state"] == {"unreadable": "KeyError"}


async def test_one_look_at_a_step_alone_raises_no_alarm() -> None:
    """After a stop of the whole process a step seems to hang that only had no time."""
    bench = Bench()
    await bench.look(seconds=11.0, began=1.0, is_overdue=True, is_hung=True)
    await bench.look(seconds=11.0, began=2.0, is_overdue=True, is_hung=True)
    await bench.look(seconds=0.1, began=13.0)
    assert bench.changes == []


async def test_time_in_which_the_process_stood_still_is_not_the_steps() -> None:
    bench = Bench()
    bench.hub.busy.set()
    running = asyncio.ensure_future(bench.watchdog.run())
    for slept in (0.25, 0.4, 60.25, 0.25):
        for _ in range(5):
            await asyncio.sleep(0)
        bench.now += slept
        bench.slept.release()
    for _ in range(5):
        await asyncio.sleep(0)
    assert bench.loop.forgiven == [60.0]
    assert bench.hub.beats == 4
    running.cancel()


async def test_it_sleeps_while_nobody_waits_and_watches_a_hung_step_to_its_end() -> None:
    bench = Bench()
    running = asyncio.ensure_future(bench.watchdog.run())

    async def turn() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    await turn()
    assert (bench.hub.waits, bench.hub.beats) == (1, 0)
    bench.hub.busy.set()
    bench.loop.step_in_progress = StepView(11.0, 1.0, True, True)
    for _ in range(2):
        bench.slept.release()
        await turn()
    assert bench.changes == [True]
    # Its requests were aborted: nobody waits any more.
    bench.hub.busy.clear()
    bench.loop.step_in_progress = StepView()
    bench.slept.release()
    await turn()
    assert bench.changes == [True, False]
    running.cancel()
