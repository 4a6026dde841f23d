"""Tree of service processes that start together, are ready together and end together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from penstock.cli.serve.reports import ERROR, LISTENING, LOADED, READY, Report
from penstock.common.child_signal import signal_child
from penstock.common.environment import child_environment
from penstock.common.errors import StartupError
from penstock.common.progress import StageProgress

# A child's name, and the progress of its start; None: it ended.
OnProgress = Callable[[str, StageProgress | None], None]
# Seconds beyond its drain grace that a child may take after SIGTERM before it is killed.
KILL_MARGIN_SECONDS = 10.0
# The same for a child that was never ready, which has no work to finish: a stop during a start is over within 5 s.
START_PATIENCE_SECONDS = 4.0


class ServiceEnded(Exception):
    """A process of the tree ended without a request to end."""

    def __init__(self, name: str, exit_code: int) -> None:
        super().__init__(f"{name} ended unexpectedly with exit code {exit_code}")
        self.exit_code = exit_code


@dataclass
class ServiceProcess:
    """One process of the tree."""

    name: str
    process: asyncio.subprocess.Process
    reports: asyncio.StreamReader
    listening: asyncio.Future[Report]
    ready: asyncio.Future[Report]
    loaded: asyncio.Future[Report]
    # Its flags that this process has under another name.
    renamed: Mapping[str, str]
    # Resolves to the exit code once the process is gone.
    ended: asyncio.Task[int] = field(init=False)

    @property
    def exit_code(self) -> int:
        """Exit code as in a shell: 128 + n for signal n. It is never 0 for an end that was not requested."""
        code = self.ended.result()
        return 128 - code if code < 0 else code or 1

    @property
    def is_ready(self) -> bool:
        """True from its READY to its end."""
        return self.ready.done() and self.ready.exception() is None and not self.ended.done()

    @property
    def address(self) -> str:
        """Address of gRPC; valid once it listens."""
        return next(iter(self.listening.result().addresses.values()))


class Supervisor:
    """Starts children, waits for them, and stops them. For the main thread only: see `die_with_parent`."""

    def __init__(self, *, drain_grace_seconds: float, on_progress: OnProgress) -> None:
        self._patience = drain_grace_seconds + KILL_MARGIN_SECONDS
        self._on_progress = on_progress
        self.children: list[ServiceProcess] = []

    async def start(
        self,
        name: str,
        arguments: list[str],
        *,
        without: Collection[str] = (),
        fds: tuple[int, ...] = (),
        renamed: Mapping[str, str] = MappingProxyType({}),
    ) -> ServiceProcess:
        """Start `penstock ARGUMENTS` as a child that reports to this process and dies with it.

        It does not get the variables `without`, and inherits `fds`. Its error names flags as `renamed` has them.
        """
        read_end, write_end = os.pipe()
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb"))
        reporting = ["--report-fd", str(write_end), "--parent-pid", str(os.getpid())]
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "penstock.cli.main", *arguments, *reporting),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(write_end, *fds),
                # Ctrl-C reaches only this process, which stops the children in order.
                start_new_session=True,
                env=child_environment(without),
            )
        finally:
            os.close(write_end)
        futures = loop.create_future(), loop.create_future(), loop.create_future()
        child = ServiceProcess(name, process, reader, *futures, renamed)
        child.ended = asyncio.create_task(self._follow(child))
        self.children.append(child)
        return child

    async def _follow(self, child: ServiceProcess) -> int:
        while line := await child.reports.readline():
            self._take(child, Report.decode(line))
        self._on_progress(child.name, None)
        code = await child.process.wait()
        for waiting in (child.listening, child.loaded, child.ready):
            if not waiting.done():
                waiting.set_exception(ServiceEnded(child.name, 128 - code if code < 0 else code or 1))
                # Marks the error as retrieved: the tree ends in any case.
                waiting.exception()
        return code

    def _take(self, child: ServiceProcess, report: Report) -> None:
        if report.progress is not None:
            self._on_progress(child.name, report.progress)
        elif report.event == LISTENING:
            child.listening.set_result(report)
        elif report.event == LOADED:
            child.loaded.set_result(report)
        elif report.event == READY:
            child.ready.set_result(report)
        elif report.event == ERROR:
            flag = report.flag if report.flag is None else child.renamed.get(report.flag, report.flag)
            error = StartupError(f"{child.name}: {report.message}", flag=flag)
            for waiting in (child.listening, child.loaded, child.ready):
                if not waiting.done():
                    waiting.set_exception(error)
                    waiting.exception()

    async def wait_any_end(self) -> ServiceProcess:
        """Wait for and return the first child that ends."""
        await asyncio.wait([child.ended for child in self.children], return_when=asyncio.FIRST_COMPLETED)
        return next(child for child in self.children if child.ended.done())

    async def stop(self, hurry: asyncio.Event) -> None:
        """Send SIGTERM to each child in reverse order of start, one after the other; `hurry` or a timeout kills.

        Later children use earlier ones, so streams end before the services that they depend on. Children that are
        still starting go first, all at once: nobody uses them yet.
        """
        starting = [child for child in self.children if not child.ready.done()]
        await self._stop_at_once(starting, hurry)
        for child in reversed(self.children):
            if not child.ended.done():
                signal_child(child.process, signal.SIGTERM)
                await self._wait_end(child, hurry)

    async def stop_together(self, hurry: asyncio.Event) -> None:
        """Stop as `stop`, but all at once: for children that do not use each other."""
        await self._stop_at_once(self.children, hurry)

    async def _stop_at_once(self, children: Sequence[ServiceProcess], hurry: asyncio.Event) -> None:
        living = [child for child in children if not child.ended.done()]
        for child in living:
            signal_child(child.process, signal.SIGTERM)
        await asyncio.gather(*(self._wait_end(child, hurry) for child in living))

    async def _wait_end(self, child: ServiceProcess, hurry: asyncio.Event) -> None:
        hurried = asyncio.create_task(hurry.wait())
        patience = self._patience if child.ready.done() else START_PATIENCE_SECONDS
        await asyncio.wait([child.ended, hurried], timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not child.ended.done():
            signal_child(child.process, signal.SIGKILL)
            await child.ended


async def first_of(wanted: Sequence[asyncio.Future[Any]], stop: asyncio.Event, on_each: Callable[[int], None]) -> bool:
    """Wait for all that is wanted; False when `stop` came first. Raises the first StartupError or ServiceEnded.

    `on_each(i)` is called as each arrives.
    """
    stopped = asyncio.create_task(stop.wait())
    open_reports = dict(enumerate(wanted))
    try:
        while open_reports:
            waiting: list[asyncio.Future[object]] = [stopped, *open_reports.values()]  # type: ignore[list-item]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for index in [index for index, report in open_reports.items() if report.done()]:
                open_reports.pop(index).result()
                on_each(index)
            if stopped.done():
                return False
        return True
    finally:
        stopped.cancel()
