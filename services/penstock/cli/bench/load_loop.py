"""Open and closed loops over a target."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.cli.bench.config import BenchConfig
from penstock.cli.bench.target import BenchPrompt, Sample

# Error of an open loop when the server does not keep up: the request was never sent.
NOT_SENT = "NOT_SENT max_open_requests"


class LoadTarget(Protocol):
    """Part of a Target that the loops use."""

    async def run(self, prompt: BenchPrompt, due: float) -> Sample:
        """Run one request to its end."""
        ...


@dataclass(slots=True)
class Run:
    """Requests sent, and their samples."""

    samples: list[Sample] = field(default_factory=list)
    sent: int = 0
    open: int = 0
    # time.perf_counter() when sending began, and after the last answer.
    started: float = 0.0
    ended: float = 0.0


Progress = Callable[[Run], None]


class PromptSource(Protocol):
    """Endless prompts."""

    def __next__(self) -> BenchPrompt: ...


class Loop:
    """Sender of `config`'s load, once."""

    def __init__(self, config: BenchConfig, server: LoadTarget, prompts: PromptSource, progress: Progress) -> None:
        self._config, self._server, self._prompts, self._progress = config, server, prompts, progress
        self._run = Run()

    async def warm_up(self) -> None:
        """Send requests that do not count, no more at a time than the load itself."""
        left = iter(range(self._config.warmup))

        async def stream() -> None:
            for _ in left:
                await self._server.run(next(self._prompts), time.perf_counter())

        await asyncio.gather(*(stream() for _ in range(min(self._config.warmup, self._config.num_streams))))

    async def measure(self) -> Run:
        """Send the load, and wait until its last request ends."""
        run = self._run
        run.started = time.perf_counter()
        await (self._closed() if self._config.rate is None else self._open(self._config.rate))
        run.ended = time.perf_counter()
        return run

    def _more(self) -> bool:
        config, run = self._config, self._run
        if config.duration_seconds is not None and time.perf_counter() - run.started >= config.duration_seconds:
            return False
        return config.num_requests is None or run.sent < config.num_requests

    async def _request(self, due: float) -> None:
        run = self._run
        run.open += 1
        try:
            run.samples.append(await self._server.run(next(self._prompts), due))
        finally:
            run.open -= 1
        self._progress(run)

    async def _closed(self) -> None:
        async def stream() -> None:
            while self._more():
                self._run.sent += 1
                await self._request(time.perf_counter())

        await asyncio.gather(*(stream() for _ in range(self._config.num_streams)))

    async def _open(self, rate: float) -> None:
        run, arrivals = self._run, random.Random(self._config.seed)
        due = run.started
        async with asyncio.TaskGroup() as tasks:
            for _ in itertools.count():
                due += arrivals.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                if not self._more():
                    break
                run.sent += 1
                if run.open >= self._config.max_open_requests:
                    run.samples.append(Sample(due, 0, ended=time.perf_counter(), failure=NOT_SENT))
                    continue
                tasks.create_task(self._request(due))
                await asyncio.sleep(0)  # so that `open` counts it
