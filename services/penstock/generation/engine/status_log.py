"""Log lines about the process itself: periodic ones on load and throughput, and the engine's state on demand."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from penstock.common.logging import get_logger
from penstock.generation.engine.loop import EngineLoop
from penstock.generation.engine.stats import EngineStats

_log = get_logger("penstock.generation")


class _Totals(NamedTuple):
    """Counters at one moment."""

    at: float
    steps: int
    prompt_tokens: int
    generated_tokens: int
    lookups: int
    hits: int
    preemptions: int


class StatusLog:
    """Writer of these lines. Used on the event loop: `start` once the engine runs, `stop` before it ends."""

    def __init__(self, loop: EngineLoop, stats: EngineStats, interval_seconds: float) -> None:
        """`interval_seconds` 0: no line."""
        self._loop = loop
        self._stats = stats
        self._interval = interval_seconds
        self._periodic: asyncio.Task[None] | None = None
        self._dumping: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Begin with the periodic lines."""
        if self._interval:
            self._periodic = asyncio.create_task(self._run())

    def stop(self) -> None:
        """End lines and dumps."""
        self._stopped = True
        for task in (self._periodic, self._dumping):
            if task is not None:
                task.cancel()

    def dump_soon(self) -> None:
        """Log the engine's state soon. One dump runs at a time: calls meanwhile give one record."""
        if not self._stopped and (self._dumping is None or self._dumping.done()):
            self._dumping = asyncio.create_task(self._dump())

    async def _dump(self) -> None:
        try:
            dump = await self._loop.dump()
        except Exception:  # the engine changed during every attempt; the process goes on
            _log.exception("engine state could not be read")
            return
        # A warning: somebody asked for it, and the processes of `penstock serve` log nothing below that.
        _log.warning("engine state", state=dump.as_dict())

    async def _run(self) -> None:
        before = self._totals()
        while True:
            await asyncio.sleep(self._interval)
            try:
                before = self._report(before)
            except Exception:  # this line is lost, those after it are not
                _log.exception("no status line")

    def _report(self, before: _Totals) -> _Totals:
        """Log one line if a request runs or waits, or a counter changed since `before`."""
        now, load = self._totals(), self._loop.load
        if now[1:] == before[1:] and not (load.running_requests or load.waiting_requests):
            return now
        seconds, lookups, last = now.at - before.at, now.lookups - before.lookups, self._stats.last_step
        step = 0.0 if last is None else sum(last[2:])
        _log.info(
            "status",
            running=load.running_requests,
            queued=load.waiting_requests,
            prompt_tokens_per_second=round((now.prompt_tokens - before.prompt_tokens) / seconds, 1),
            generated_tokens_per_second=round((now.generated_tokens - before.generated_tokens) / seconds, 1),
            pool_use=round(load.kv_usage, 3),
            prefix_hit_rate=round((now.hits - before.hits) / lookups, 3) if lookups else None,
            preemptions=now.preemptions - before.preemptions,
            steps=now.steps - before.steps,
            last_step_ms=round(step * 1e3, 2),
            # Without it, requests that run without a step would look like a hang.
            **({"paused": True} if self._loop.is_paused else {}),
        )
        return now

    def _totals(self) -> _Totals:
        stats = self._stats
        return _Totals(
            time.monotonic(),
            stats.steps,
            stats.prompt_tokens,
            stats.generated_tokens,
            stats.prefix_lookup_tokens,
            stats.prefix_hit_tokens,
            stats.preemptions,
        )
