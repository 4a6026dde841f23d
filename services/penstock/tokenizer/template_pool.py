"""Processes that render chat templates; one that dies or overruns its time is replaced.

A process renders one request at a time. It gets the next few before it has answered the first: sent singly they would
cost many times as much, with a wake-up of both processes for each. Requests behind one that overran are sent to another
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from penstock.common.child_io import Child, ChildEnded, pack
from penstock.common.environment import child_environment
from penstock.common.errors import Internal, PenstockError, ResourceExhausted, StartupError, Unavailable
from penstock.common.logging import get_logger
from penstock.tokenizer.metrics import TokenizerMetrics

# Seconds before the next attempt to start a process: doubled each time, from the first number to the second.
RESTART_SECONDS, MAX_RESTART_SECONDS = 0.5, 30.0
# No request is queued behind a rendering that has already taken this many seconds, and none of this many bytes is given
# to a busy process.
_SLOW_SECONDS, _LARGE_BYTES = 0.01, 64 << 10
_log = get_logger("penstock.tokenizer.template_pool")
T = TypeVar("T")


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of one rendering; `processes`, `pipeline` and `max_queued` are the pool's."""

    processes: int = 2
    # Most requests that one process has at a time.
    pipeline: int = 4
    max_queued: int = 256
    seconds: float = 2.0
    memory_bytes: int = 256 << 20
    start_seconds: float = 30.0


@dataclass(eq=False, slots=True)
class _Ask:
    """A packed request and the future of its answer; a caller that gives up cancels it."""

    message: bytes
    answer: asyncio.Future[dict[str, Any]]
    # True when it may be sent to another process after this one died: it is probably not the cause.
    again: bool = True

    def fail(self, error: PenstockError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(eq=False, slots=True)
class _Worker:
    """A process and its requests, in order. It works on the first."""

    child: Child
    asked: deque[_Ask] = field(default_factory=deque)
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None


class TemplatePool:
    """Pool that renders with the least busy process. Belongs to one event loop."""

    def __init__(self, settings: Mapping[str, Any], limits: TemplateLimits, metrics: TokenizerMetrics) -> None:
        """Make it. `settings` are Renderer's."""
        self._settings = {**settings, "cpu_seconds": limits.seconds, "memory_bytes": limits.memory_bytes}
        self._limits = limits
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Ask] = deque()
        self._workers: list[_Worker] = []
        # Processes that are starting, or that must be killed.
        self._others: set[Child] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def queued(self) -> int:
        """Number of requests that wait for a process."""
        return len(self._waiting)

    @property
    def pids(self) -> list[int]:
        """Process ids of the live processes."""
        return [worker.child.pid for worker in self._workers]

    async def start(self, first: Child) -> None:
        """Use `first`, from load_process.py, as a process, and start the others in the background.

        Raises StartupError naming a template that does not compile.
        """
        await self._start_one(first)
        self._starting = [self._spawn(self._keep_starting()) for _ in range(1, self._limits.processes)]

    async def wait_complete(self) -> None:
        """Return once every process has started."""
        await asyncio.gather(*self._starting)

    async def render(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the child's answer. Raises ResourceExhausted (queue, time or memory) and Internal (the child died)."""
        if len(self._waiting) >= self._limits.max_queued:
            raise ResourceExhausted("too many chat templates are waiting", reason="QUEUE_FULL", retry_after_seconds=0.1)
        ask = _Ask(pack(request), self._loop.create_future())
        self._waiting.append(ask)
        self._dispatch()
        try:
            return await ask.answer
        except asyncio.CancelledError:
            # A process still answers the request, and the answer is dropped.
            with contextlib.suppress(ValueError):
                self._waiting.remove(ask)
            raise

    async def close(self) -> None:
        """End every process."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        workers, self._workers = self._workers, []
        for worker in workers:
            self._stop_timer(worker)
        asked = [ask for worker in workers for ask in worker.asked]
        for ask in (*asked, *self._waiting):
            ask.fail(Unavailable("closing", reason="DRAINING"))
        self._waiting.clear()
        await asyncio.gather(*(child.kill() for child in (*self._others, *(worker.child for worker in workers))))

    def _dispatch(self) -> None:
        """Send waiting requests to processes with room."""
        alive = [worker for worker in self._workers if not worker.child.ended.done()]
        while self._waiting and alive:
            worker = min(alive, key=_length)
            if worker.asked and not self._has_room(worker, self._waiting[0]):
                break
            ask = self._waiting.popleft()
            worker.asked.append(ask)
            if len(worker.asked) == 1:
                self._start_timer(worker)
            worker.child.send(ask.message, partial(self._answered, worker))
        self._metrics.queue_depth["template"].set(len(self._waiting))

    def _has_room(self, worker: _Worker, ask: _Ask) -> bool:
        is_small = len(ask.message) < _LARGE_BYTES and len(worker.asked[-1].message) < _LARGE_BYTES
        is_quick = self._loop.time() - worker.since < _SLOW_SECONDS
        return is_small and is_quick and len(worker.asked) < self._limits.pipeline

    def _answered(self, worker: _Worker, answer: dict[str, Any]) -> None:
        if worker not in self._workers:
            return  # too late: it is being killed
        self._stop_timer(worker)
        ask = worker.asked.popleft()
        if answer.get("failure") == "memory":
            ask.fail(_over("memory"))
            self._replace(worker)
            return
        if not ask.answer.done():
            ask.answer.set_result(answer)
        if worker.asked:
            self._start_timer(worker)
        self._dispatch()

    def _start_timer(self, worker: _Worker) -> None:
        worker.since = self._loop.time()
        worker.timer = self._loop.call_at(worker.since + self._limits.seconds, self._overran, worker)

    def _stop_timer(self, worker: _Worker) -> None:
        if worker.timer is not None:
            worker.timer.cancel()
            worker.timer = None

    def _overran(self, worker: _Worker) -> None:
        worker.asked.popleft().fail(_over("time"))
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        """Kill a process and start another; its unanswered requests are sent again."""
        self._stop_timer(worker)
        self._workers.remove(worker)
        self._others.add(worker.child)
        self._waiting.extendleft(reversed(worker.asked))
        worker.asked.clear()
        self._spawn(self._end(worker.child))
        self._dispatch()

    async def _end(self, child: Child) -> None:
        await child.kill()
        self._others.discard(child)
        _log.warning("template process replaced", status=child.returncode)
        self._metrics.template_processes_replaced.inc()
        self._spawn(self._keep_starting())

    def _ended(self, worker: _Worker, _: object) -> None:
        """Replace a process that ended on its own."""
        if worker in self._workers and not self._closed:
            self._stop_timer(worker)
            self._spawn(self._bury(worker))

    async def _bury(self, worker: _Worker) -> None:
        await worker.child.wait_status()
        if worker not in self._workers:
            return
        if worker.asked:
            first, status = worker.asked[0], worker.child.returncode
            # The process may have ended while it was idle, which is not this request's fault: try once more.
            if not first.again or status == -signal.SIGXCPU:
                worker.asked.popleft()
                first.fail(_died(status))
            first.again = False
        self._replace(worker)

    async def _keep_starting(self) -> None:
        """Start one process, and retry until it works: a shrinking pool would end without processes."""
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

    async def _start_one(self, known: Child | None = None) -> None:
        if self._closed:
            raise Unavailable("closing", reason="DRAINING")
        child = known or await Child.spawn("penstock.tokenizer.template_process", child_environment())
        self._others.add(child)
        try:
            async with asyncio.timeout(self._limits.start_seconds):
                wrong = (await child.ask(self._settings))["wrong"]
        except (TimeoutError, ChildEnded) as error:
            await child.kill()
            self._others.discard(child)
            if known is not None and isinstance(error, ChildEnded):
                # It may have ended after it loaded, which says nothing about the templates.
                await self._start_one()
                return
            raise StartupError("the chat template process did not start") from error
        if wrong:
            name, message = next(iter(wrong.items()))
            raise StartupError(f"chat template {name!r} does not compile: {message}; check MODEL", flag="MODEL")
        self._others.discard(child)
        worker = _Worker(child)
        self._workers.append(worker)
        child.ended.add_done_callback(partial(self._ended, worker))
        self._dispatch()

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _length(worker: _Worker) -> int:
    return len(worker.asked)


def _died(status: int | None) -> PenstockError:
    if status == -signal.SIGXCPU:  # the kernel's clock ran faster than this process's
        return _over("time")
    if status == -signal.SIGKILL:  # not sent from here: by the kernel, for lack of memory
        return _over("memory")
    _log.error("template process died", status=status)
    return Internal("the process rendering the chat template died", reason="TEMPLATE_PROCESS_DIED")


def _over(what: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"rendering the chat template took more {what} than allowed", reason=f"TEMPLATE_{what.upper()}_LIMIT"
    )
