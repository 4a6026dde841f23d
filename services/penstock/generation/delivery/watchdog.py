"""Watchdog of the engine's thread: heartbeats while it makes progress, an alarm when one of its steps hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.common.logging import get_logger
from penstock.generation.delivery.hub import OutputHub
from penstock.generation.engine.dump import EngineDump
from penstock.generation.engine.step_watch import StepView

_log = get_logger("penstock.generation")


class WatchedLoop(Protocol):
    """Interface of the engine's loop to the watchdog."""

    @property
    def step_in_progress(self) -> StepView:
        """Return the state of the thread's current step, at once."""

    @property
    def is_paused(self) -> bool:
        """True while a pause holds its steps."""

    def forgive_step(self, seconds: float) -> None:
        """Subtract time from the thread's current step."""

    async def dump(self, wait_seconds: float | None = None) -> EngineDump:
        """Return the engine's state, even when the thread hangs."""


class Watchdog:
    """Watchdog of one engine. It looks only while requests are live. Belongs to the event loop.

    A step counts as hung when two looks in a row find it so. Time in which the whole process stood still (a stopped
    container, a suspended machine) does not count: the watchdog notices it, since its own look is then late by more
    than a heartbeat.
    """

    def __init__(
        self,
        loop: WatchedLoop,
        hub: OutputHub,
        seconds: float,
        on_change: Callable[[bool], Awaitable[None]],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """It looks every `seconds`; `on_change` is called with True when a step hangs, and with False when it ended."""
        self._loop = loop
        self._hub = hub
        self._seconds = seconds
        self._on_change = on_change
        self._sleep = sleep
        self._clock = clock
        # Begin of the step that the last look found to hang.
        self._suspect: float | None = None
        self._is_hung = False

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            if not self._is_hung:
                await self._hub.wait_busy()
            began = self._clock()
            await self._sleep(self._seconds)
            late = self._clock() - began - self._seconds
            if late > self._seconds:
                self._loop.forgive_step(late)
            await self.look()

    async def look(self) -> None:
        """Look once: tell the waiting callers, and the alarm."""
        view = self._loop.step_in_progress
        if not view.is_overdue:
            self._hub.beat()
        if view.seconds >= self._seconds or self._loop.is_paused:
            # The load has changed: a watcher sees how long the step runs, or the pause lasts.
            self._hub.notify()
        is_hung = view.is_hung and self._suspect == view.began
        self._suspect = view.began if view.is_hung else None
        if is_hung != self._is_hung and (is_hung or not view.is_hung):
            self._is_hung = is_hung
            await self._announce(view)

    async def _announce(self, view: StepView) -> None:
        await self._on_change(self._is_hung)
        self._hub.notify()
        if not self._is_hung:
            _log.warning("the engine's step ended after all: health is SERVING again")
            return
        try:
            state = (await self._loop.dump(0.0)).as_dict()
        except Exception as error:
            # The engine's thread may be stuck anywhere while its state is read. The alarm must go out even if that
            # fails. The error's text may contain private data, such as a request.
            state = {"unreadable": type(error).__name__}
        _log.error("an engine step hangs: health is NOT_SERVING", seconds=round(view.seconds, 1), state=state)
