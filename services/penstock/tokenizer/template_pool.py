"""Killable processes that render chat templates: one request at a time each, replaced when they die or overrun."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.common.child_io import Child, ChildEnded
from penstock.common.config import child_environment
from penstock.common.errors import Internal, PenstockError, ResourceExhausted, StartupError, Unavailable
from penstock.common.logging import get_logger
from penstock.tokenizer.metrics import TokenizerMetrics

# Before another try at starting a process that did not start; doubled each time up to the second.
RESTART_SECONDS, MAX_RESTART_SECONDS = 0.5, 30.0
_log = get_logger("penstock.tokenizer.template_pool")
T = TypeVar("T")


@dataclass(frozen=True)
class TemplateLimits:
    """Of one rendering; `processes` and `max_queued` are of the pool."""

    processes: int = 2
    max_queued: int = 256
    seconds: float = 2.0
    memory_bytes: int = 256 << 20
    start_seconds: float = 30.0


class TemplatePool:
    """Renders with whichever process is free. All methods belong to one event loop."""

    def __init__(self, settings: Mapping[str, Any], limits: TemplateLimits, metrics: TokenizerMetrics) -> None:
        """`settings` are Renderer's."""
        self._settings = {**settings, "cpu_seconds": limits.seconds, "memory_bytes": limits.memory_bytes}
        self._limits = limits
        self._metrics = metrics
        self._free: asyncio.Queue[Child] = asyncio.Queue()
        self._processes: set[Child] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._others: list[asyncio.Task[None]] = []
        self._queued = 0
        self._closed = False

    @property
    def queued(self) -> int:
        """Requests waiting for a process."""
        return self._queued

    @property
    def pids(self) -> list[int]:
        """Of the live processes."""
        return [process.pid for process in self._processes]

    async def start(self) -> None:
        """Start one process and, behind it, the others. Raises StartupError naming a template that does not compile."""
        await self._start_one()
        self._others = [self._spawn(self._keep_starting()) for _ in range(1, self._limits.processes)]

    async def wait_complete(self) -> None:
        """Return once every process has started."""
        await asyncio.gather(*self._others)

    async def render(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The child's answer. Raises ResourceExhausted (queue, time or memory) and Internal (the child died)."""
        if self._queued >= self._limits.max_queued:
            raise ResourceExhausted("too many chat templates are waiting", reason="QUEUE_FULL", retry_after_seconds=0.1)
        self._count(1)
        try:
            process = await self._take()
        finally:
            self._count(-1)
        # The exchange outlives a caller that gives up: an answer left in the pipe would reach the next request.
        exchange = self._spawn(self._exchange(process, request))
        return await asyncio.shield(exchange)

    async def _take(self) -> Child:
        """A free process that lives; one that ended while it waited is replaced."""
        while (process := await self._free.get()).returncode is not None:
            await self._replace(process)
        return process

    async def close(self) -> None:
        """End every process."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in self._processes))
        self._processes.clear()

    async def _exchange(self, process: Child, request: Mapping[str, Any], *, again: bool = True) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._limits.seconds):
                answer: dict[str, Any] = await process.ask(request)
        except TimeoutError:
            await self._replace(process)
            raise _over("time") from None
        except ChildEnded:
            await self._replace(process)
            # Perhaps it was ended while it waited, which is not this request's fault: one more try.
            if again and process.returncode != -signal.SIGXCPU:
                return await self._exchange(await self._take(), request, again=False)
            raise self._died(process) from None
        except asyncio.CancelledError:
            await self._replace(process)
            raise
        if answer.get("failure") == "memory":
            await self._replace(process)
            raise _over("memory")
        self._free.put_nowait(process)
        return answer

    def _died(self, process: Child) -> PenstockError:
        if process.returncode == -signal.SIGXCPU:  # the kernel's clock ran faster than ours
            return _over("time")
        if process.returncode == -signal.SIGKILL:  # not ours: the kernel, for lack of memory
            return _over("memory")
        _log.error("template process died", status=process.returncode)
        return Internal("the process rendering the chat template died", reason="TEMPLATE_PROCESS_DIED")

    async def _replace(self, process: Child) -> None:
        self._processes.discard(process)
        await process.kill()
        if not self._closed:
            _log.warning("template process replaced", status=process.returncode)
            self._metrics.template_processes_replaced.inc()
            self._spawn(self._keep_starting())

    async def _keep_starting(self) -> None:
        """Start one process, however often it takes: a pool that shrinks ends up answering nobody."""
        delay = RESTART_SECONDS
        while not self._closed:
            try:
                await self._start_one()
                return
            except (StartupError, OSError) as error:  # OSError: no descriptors, no memory for another process
                reason = error.message if isinstance(error, StartupError) else type(error).__name__
                _log.error("template process did not start", reason=reason, retry_seconds=delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RESTART_SECONDS)

    async def _start_one(self) -> None:
        if self._closed:
            raise Unavailable("closing", reason="DRAINING")
        process = await Child.spawn("penstock.tokenizer.template_process", child_environment())
        self._processes.add(process)
        try:
            async with asyncio.timeout(self._limits.start_seconds):
                wrong = (await process.ask(self._settings))["wrong"]
        except (TimeoutError, ChildEnded) as error:
            self._processes.discard(process)
            await process.kill()
            raise StartupError("the chat template process did not start") from error
        if wrong:
            name, message = next(iter(wrong.items()))
            raise StartupError(f"chat template {name!r} does not compile: {message}; check MODEL", flag="MODEL")
        self._free.put_nowait(process)

    def _count(self, change: int) -> None:
        self._queued += change
        self._metrics.queue_depth["template"].set(self._queued)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _over(what: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"rendering the chat template took more {what} than allowed", reason=f"TEMPLATE_{what.upper()}_LIMIT"
    )
