"""States of the model, and the ways between them: what cannot be does not happen."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from penstock.common.errors import FailedPrecondition, Unavailable
from penstock.generation.lifecycle import Lifecycle, ModelState


class Core:
    """A core whose reload waits, and that counts those who are told."""

    def __init__(self) -> None:
        self.told = 0
        self.hub = SimpleNamespace(notify=self._notify)
        # (number, seconds) of pauses, None for each end.
        self.pauses: list[tuple[int, float] | None] = []
        self.loop = SimpleNamespace(pause=self._pause, resume=lambda: self.pauses.append(None))
        self.may_reload = asyncio.Event()

    def _notify(self) -> None:
        self.told += 1

    def _pause(self, number: int, seconds: float) -> Future[None]:
        self.pauses.append((number, seconds))
        held: Future[None] = Future()
        held.set_result(None)
        return held

    async def finish(self, _: float | None) -> int:
        return 3

    async def reload(self) -> None:
        await self.may_reload.wait()


class Process:
    """A lifecycle, and what it shows as health."""

    def __init__(self) -> None:
        self.shown: list[bool] = []
        self.lifecycle = Lifecycle("m")
        self.lifecycle.bind_health(self._show)
        self.core: Any = Core()

    async def _show(self, is_serving: bool) -> None:
        self.shown.append(is_serving)

    def ready(self) -> Lifecycle:
        self.lifecycle.serve(self.core)
        return self.lifecycle


def reason(lifecycle: Lifecycle) -> str:
    """Return why no new work is taken."""
    with pytest.raises(Unavailable) as refused:
        lifecycle.accepting()
    return refused.value.reason


async def test_a_process_lives_through_its_states() -> None:
    process = Process()
    lifecycle = process.lifecycle
    assert (lifecycle.state, reason(lifecycle)) == (ModelState.LOADING, "STARTING")
    lifecycle.note_percent(50.0)
    lifecycle.note_stage("weights")
    assert (lifecycle.percent_loaded, lifecycle.load_stage) == (50.0, "weights")
    lifecycle.serve(process.core)
    assert (lifecycle.accepting(), lifecycle.percent_loaded, lifecycle.num_loads) == (process.core, 100.0, 1)
    lifecycle.begin_unload()
    assert reason(lifecycle) == "DRAINING"
    with pytest.raises(Unavailable, match="unloaded"):
        lifecycle.resume()
    lifecycle.drop_core()
    lifecycle.become_empty()
    assert (reason(lifecycle), lifecycle.model_name) == ("NO_MODEL", "")
    lifecycle.begin_load("n")
    assert (lifecycle.state, lifecycle.model_name) == (ModelState.LOADING, "n")
    lifecycle.serve(process.core)
    lifecycle.end()
    assert reason(lifecycle) == "ENGINE_FAILED"


async def test_a_load_into_a_process_with_a_model_cannot_begin() -> None:
    lifecycle = Process().ready()
    with pytest.raises(RuntimeError, match="READY cannot become LOADING"):
        lifecycle.begin_load("n")
    assert (lifecycle.state, lifecycle.model_name) == (ModelState.READY, "m")


async def test_a_model_that_serves_does_not_vanish() -> None:
    with pytest.raises(RuntimeError, match="READY cannot become EMPTY"):
        Process().ready().become_empty()


async def test_a_process_that_has_ended_stays_so() -> None:
    process = Process()
    lifecycle = process.lifecycle
    lifecycle.end()
    lifecycle.serve(process.core)
    await lifecycle.show_health()
    lifecycle.become_empty()
    lifecycle.start_drain()
    lifecycle.resume()
    assert (lifecycle.state, lifecycle.has_ended, process.shown) == (ModelState.UNAVAILABLE, True, [False])


async def test_a_load_that_ends_while_the_process_stops_takes_no_work() -> None:
    process = Process()
    process.lifecycle.stop()
    lifecycle = process.ready()
    assert reason(lifecycle) == "DRAINING"
    with pytest.raises(Unavailable, match="stopping"):
        lifecycle.resume()


async def test_those_who_watch_are_told_of_a_drain_and_of_its_end_once() -> None:
    process = Process()
    lifecycle = process.ready()
    for change in (lifecycle.start_drain, lifecycle.start_drain, lifecycle.resume, lifecycle.resume):
        change()
    assert process.core.told == 2


async def test_health_is_off_while_a_step_hangs() -> None:
    process = Process()
    lifecycle = process.ready()
    await lifecycle.set_hung(True)
    assert reason(lifecycle) == "ENGINE_HUNG"
    assert lifecycle.loaded() is process.core
    await lifecycle.set_hung(False)
    assert process.shown == [False, True]


@pytest.mark.parametrize("drained", ["before", "meanwhile", ""])
async def test_a_reload_resumes_unless_the_process_was_drained(drained: str) -> None:
    process = Process()
    lifecycle = process.ready()
    if drained == "before":
        lifecycle.start_drain()
    reload = asyncio.ensure_future(lifecycle.reload(None))
    while not process.shown:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert lifecycle.is_reloading
    with pytest.raises(FailedPrecondition, match="Reload is under way"):
        lifecycle.resume()
    with pytest.raises(FailedPrecondition, match="another Reload"):
        await lifecycle.reload(None)
    if drained == "meanwhile":
        lifecycle.start_drain()
    process.core.may_reload.set()
    assert (await reload).aborted == 3
    assert lifecycle.state is (ModelState.DRAINING if drained else ModelState.READY)
    assert process.shown == [False, not drained]


async def test_a_reload_ends_with_the_process() -> None:
    process = Process()
    lifecycle = process.ready()
    reload = asyncio.ensure_future(lifecycle.reload(None))
    while not process.shown:  # noqa: ASYNC110
        await asyncio.sleep(0)
    lifecycle.end()
    lifecycle.cancel_reload()
    with pytest.raises(asyncio.CancelledError):
        await reload
    assert (lifecycle.is_reloading, lifecycle.state) == (False, ModelState.UNAVAILABLE)


async def test_a_paused_process_takes_no_new_work_until_it_is_resumed() -> None:
    process = Process()
    lifecycle = process.ready()
    await lifecycle.pause(5.0)
    assert (lifecycle.state, reason(lifecycle), process.shown) == (ModelState.DRAINING, "DRAINING", [False])
    assert lifecycle.paused_seconds is not None
    # Longer than was asked for at first.
    await lifecycle.pause(9.0)
    assert process.core.pauses == [(1, 5.0), (2, 9.0)]
    lifecycle.resume()
    assert lifecycle.accepting() is process.core
    assert lifecycle.paused_seconds is None
    assert process.core.pauses[-1] is None


async def test_a_process_that_drains_is_not_paused() -> None:
    process = Process()
    lifecycle = process.ready()
    lifecycle.start_drain()
    with pytest.raises(Unavailable) as refused:
        await lifecycle.pause(5.0)
    assert (refused.value.reason, process.core.pauses) == ("DRAINING", [])


async def test_a_drain_ends_a_pause_and_takes_no_work_after_it() -> None:
    process = Process()
    lifecycle = process.ready()
    await lifecycle.pause(5.0)
    lifecycle.start_drain()
    assert process.core.pauses == [(1, 5.0), None]
    await lifecycle.end_pause(1)
    assert (lifecycle.state, lifecycle.paused_seconds) == (ModelState.DRAINING, None)


async def test_a_pause_that_ends_by_itself_ends_no_other() -> None:
    process = Process()
    lifecycle = process.ready()
    await lifecycle.pause(5.0)
    await lifecycle.pause(9.0)
    await lifecycle.end_pause(1)
    assert lifecycle.state is ModelState.DRAINING
    await lifecycle.end_pause(2)
    assert (lifecycle.state, process.shown[-1]) == (ModelState.READY, True)


async def test_a_reload_ends_a_pause_and_takes_work_after_it() -> None:
    process = Process()
    lifecycle = process.ready()
    await lifecycle.pause(5.0)
    process.core.may_reload.set()
    await lifecycle.reload(None)
    assert (lifecycle.state, lifecycle.paused_seconds) == (ModelState.READY, None)


@pytest.mark.parametrize("how", ["stop", "end"])
async def test_the_end_of_a_process_ends_a_pause(how: str) -> None:
    process = Process()
    lifecycle = process.ready()
    await lifecycle.pause(5.0)
    getattr(lifecycle, how)()
    assert lifecycle.paused_seconds is None
    # Live requests end within the grace of a process that stops.
    assert process.core.pauses == [(1, 5.0), *([None] if how == "stop" else [])]
    # The engine's own end of the pause comes too late.
    await lifecycle.end_pause(1)
    assert reason(lifecycle) == ("DRAINING" if how == "stop" else "ENGINE_FAILED")
