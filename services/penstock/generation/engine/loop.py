"""The engine's thread, and the only way to it from other threads."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from penstock.common.errors import Internal, InvalidArgument, PenstockError, ResourceExhausted, Unavailable
from penstock.common.logging import describe_frames, get_logger
from penstock.generation.engine.request_report import refusal
from penstock.generation.engine.stats import EngineLoad

if TYPE_CHECKING:
    from penstock.generation.core.request import Request, RequestOutput
    from penstock.generation.engine.dump import EngineDump
    from penstock.generation.engine.engine import Engine
    from penstock.generation.engine.prefix_log import PrefixLog
    from penstock.generation.engine.step_watch import StepView

_log = get_logger(__name__)
# Attempts to read an engine from outside while it may be running a step.
_DUMP_ATTEMPTS = 5
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class EngineLoop:
    """Thread that steps the engine while it has work, and sleeps on a condition while it has none: it never polls.

    The engine belongs to the thread. Other threads append commands to the inbox under the condition, and the thread
    carries them out, in order, before the next step. The outputs of a step reach the event loop by one
    `call_soon_threadsafe`.

    A queued request needs no timer for its deadline: while a request is queued or running the engine steps, and every
    step first ends overdue requests. Those of idle capacity rest between their steps for a multiple of a step's time.
    A pause holds the steps: then the thread sleeps until the first request has to end, a command comes, or the pause
    has lasted for as long as it may.
    """

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[int, list[RequestOutput]], None],
        on_failure: Callable[[BaseException], None],
        *,
        nice: int = 0,
        on_pause_over: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`deliver` (engine steps so far, outputs of the last one) and `on_failure` run on `loop`.

        `nice` is added to the niceness of the thread, and of the threads that its kernels start (Linux only).

        `on_pause_over` (number of the pause) runs on `loop` when a pause has ended since it lasted for as long as it
        may.

        After `on_failure` the engine is dead: every live request has had its FinishedOutput (`Engine.fail_all`), and
        the process should exit.
        """
        self._engine = engine
        self._loop = loop
        self._deliver = deliver
        self._on_failure = on_failure
        self._on_pause_over = on_pause_over
        self._nice = nice
        self._condition = threading.Condition()
        # Guarded by the condition.
        self._inbox: deque[Callable[[], None]] = deque()
        self._live: set[str] = set()
        # Requests in the inbox, and by tenant.
        self._num_inbound = 0
        self._inbound_of: Counter[str] = Counter()
        # Accepted requests that are not in `_load` yet: in the inbox, or added since the last step.
        self._num_unseen = 0
        # Tenant and expected tokens of each of them, oldest first; and their sums by tenant.
        self._unseen: deque[tuple[str, float]] = deque()
        self._unseen_of: Counter[str] = Counter()
        self._unseen_tokens: dict[str, float] = {}
        self._load = engine.load()
        self._stopping = False
        # A step has raised.
        self._has_failed = False
        # Used by the event loop only: the last requested dump, on the thread and here.
        self._pending_dump: tuple[Future[EngineDump], asyncio.Future[EngineDump]] | None = None
        # Used by the thread only: commands from the inbox, and outputs of requests that the engine refused.
        self._commands: deque[Callable[[], None]] = deque()
        self._refused: list[RequestOutput] = []
        # Written by the thread only: number of the present pause, and the time of the engine's clock at which it ends
        # by itself.
        self._pause: tuple[int, float] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Accept a request, which then gets exactly one FinishedOutput. Thread-safe; does not block.

        Raises the errors of `Engine.check` and `Engine.check_deadline`, InvalidArgument DUPLICATE_REQUEST_ID,
        ResourceExhausted QUEUE_FULL, Unavailable ENGINE_STOPPED.
        """
        self._engine.check(request)
        with self._condition:
            self._refuse_unless_open()
            if request.request_id in self._live:
                raise InvalidArgument("request_id", "is that of a live request", reason="DUPLICATE_REQUEST_ID")
            config = self._engine.config
            tenant = request.fair_share_key
            queued = self._num_inbound + self._engine.num_waiting
            # The rest of the queue is reserved for other tenants, present or not.
            own = self._engine.num_waiting_of(tenant) + self._inbound_of[tenant] if tenant else 0
            if queued >= config.max_queued_requests or own >= self._engine.shares.queued_of(tenant):
                raise ResourceExhausted(
                    "the queue is full", reason="QUEUE_FULL", retry_after_seconds=config.queue_full_retry_seconds
                )
            tokens = self._engine.check_deadline(request, self._load.pace, self._unseen_tokens)
            self._live.add(request.request_id)
            self._num_inbound += 1
            self._inbound_of[tenant] += 1
            self._num_unseen += 1
            self._unseen.append((tenant, tokens))
            self._count_unseen(tenant, 1, tokens)
            self._post(lambda: self._add(request))

    def abort(self, request_ids: Iterable[str], error: PenstockError | None = None) -> None:
        """End requests before the next step. Ids that are not live are ignored. Thread-safe."""
        ids = tuple(request_ids)
        with self._condition:
            self._post(lambda: self._abort(ids, error))

    def run_on_engine(self, call: Callable[[Engine], Result]) -> Future[Result]:
        """Run `call(engine)` on the engine's thread between two steps. Thread-safe.

        The future gets its result or exception, or Unavailable ENGINE_STOPPED when the engine stops first.
        """
        future: Future[Result] = Future()
        with self._condition:
            if self._stopping:
                future.set_exception(Unavailable("the engine has stopped", reason="ENGINE_STOPPED"))
            else:
                self._post(lambda: _fulfil(future, call, self._engine))
        return future

    def pause(self, number: int, seconds: float) -> Future[None]:
        """Take no step from now on, for at most `seconds`; a second pause takes the place of the first. Thread-safe.

        Live requests keep their blocks and go on afterwards. Commands, aborts and deadlines are carried out meanwhile.
        The future is done once no step runs; it fails as that of `run_on_engine`. `number` names it to `on_pause_over`.
        """

        def begin(engine: Engine) -> None:
            engine.pause_began()
            self._pause = number, engine.now() + seconds

        return self.run_on_engine(begin)

    def resume(self) -> Future[None]:
        """Step again, if there is a pause. Thread-safe. The future is as that of `run_on_engine`."""

        return self.run_on_engine(lambda _: self._end_pause())

    async def dump(self, wait_seconds: float | None = None) -> EngineDump:
        """Return the engine's state between two steps. Await it on the event loop.

        When the thread does not reach that point within `wait_seconds` (None: the configuration's), the state is read
        from outside, while a step may be changing it, and includes the thread's stack. Raises the errors of
        `dump_engine` when every such attempt fails.
        """
        if wait_seconds is None:
            wait_seconds = self._engine.config.dump_wait_seconds
        try:
            async with asyncio.timeout(wait_seconds):
                return await asyncio.shield(self._next_dump())
        except (TimeoutError, Unavailable):
            return self._dump_from_outside()

    @property
    def load(self) -> EngineLoad:
        """Load after the last step; requests accepted since then count as waiting. Thread-safe."""
        with self._condition:
            load, unseen = self._load, self._num_unseen
        if unseen:
            return load._replace(waiting_requests=load.waiting_requests + unseen)
        if (load.waiting_requests or load.running_requests) and not self.is_paused:
            return load
        # Nothing has happened since the last step: its figures are those of now.
        return load._replace(measured_at=self._engine.now())

    @property
    def is_paused(self) -> bool:
        """True while a pause holds the steps. Thread-safe."""
        return self._pause is not None

    @property
    def step_in_progress(self) -> StepView:
        """State of the step that the thread is in. Thread-safe; it never waits for the step."""
        return self._engine.watch.look()

    @property
    def prefix_log(self) -> PrefixLog | None:
        """Log of the prefixes that the pools keep, for readers on any thread; None: there is no prefix cache."""
        return self._engine.prefix_log

    def forgive_step(self, seconds: float) -> None:
        """Subtract time in which the whole process stood still from the current step."""
        self._engine.watch.forgive(seconds)

    def stop(self, wait_seconds: float | None = None) -> bool:
        """End every live request (UNAVAILABLE before its first token, ABORTED after it) and join the thread.

        Blocks for at most one step, or `wait_seconds`: from the event loop call it by `asyncio.to_thread`. False: the
        thread hangs; it ends with the process. Calling it again is harmless.
        """
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def save_prefixes(self) -> int:
        """Write prefixes to the store of blocks: see Engine. Only after `stop` has returned True; it blocks.

        After a failed step it writes nothing.
        """
        return 0 if self._has_failed else self._engine.save_prefixes()

    def _next_dump(self) -> asyncio.Future[EngineDump]:
        """Return the next dump of the thread. Calls share it, so that they do not pile up at a thread that hangs."""
        pending = self._pending_dump
        # A dump that has begun may show a state before this call.
        if pending is None or pending[0].running() or pending[0].done():
            posted = self.run_on_engine(lambda engine: engine.dump())
            pending = self._pending_dump = (posted, asyncio.wrap_future(posted))
        return pending[1]

    def _dump_from_outside(self) -> EngineDump:
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = () if frame is None else tuple(reversed(describe_frames(walk_stack(frame))))
        for _ in range(_DUMP_ATTEMPTS - 1):
            with suppress(RuntimeError, KeyError, IndexError):
                return replace(self._engine.dump(), stack=stack)
        return replace(self._engine.dump(), stack=stack)

    def _state_or_none(self) -> dict[str, Any] | None:
        """Return the state for the log; None if that fails: requests of a broken engine must still get their ends."""
        try:
            return self._engine.dump().as_dict()
        except Exception as error:
            _log.warning("the engine's state cannot be read", error=type(error).__name__)
            return None

    def _count_unseen(self, tenant: str, requests: int, tokens: float) -> None:
        """Change the sums. The condition is held."""
        self._unseen_of[tenant] += requests
        self._unseen_tokens[tenant] = self._unseen_tokens.get(tenant, 0.0) + tokens
        if not self._unseen_of[tenant]:
            del self._unseen_of[tenant], self._unseen_tokens[tenant]

    def _post(self, command: Callable[[], None]) -> None:
        """Append a command. The condition is held. After the thread's end it is not carried out."""
        self._inbox.append(command)
        self._condition.notify()

    def _refuse_unless_open(self) -> None:
        if self._stopping:
            raise Unavailable("the engine has stopped", reason="ENGINE_STOPPED")

    def _add(self, request: Request) -> None:
        """Add a request, on the thread. One that the engine refuses now still gets its FinishedOutput."""
        try:
            self._engine.add(request)
        except PenstockError as error:
            self._refused.append(refusal(request, error))
        except Exception:  # one request's own failure: the others go on
            _log.exception("request could not start", request_id=request.request_id)
            self._refused.append(refusal(request, Internal("decoding failed", reason="DECODING_FAILED")))
        tenant = request.fair_share_key
        with self._condition:
            self._num_inbound -= 1
            self._inbound_of[tenant] -= 1
            if not self._inbound_of[tenant]:
                del self._inbound_of[tenant]

    def _abort(self, request_ids: tuple[str, ...], error: PenstockError | None) -> None:
        # At the end everything is ended anyway, and the engine may be broken.
        if not self._stopping:
            for request_id in request_ids:
                self._engine.abort(request_id, error)

    def _run(self) -> None:
        if self._nice and sys.platform == "linux":
            # On Linux niceness belongs to a thread. OpenMP's threads are started by this one and inherit it.
            thread = threading.get_native_id()
            # A sandbox may forbid it.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self._nice)
        watch = self._engine.watch
        try:
            while self._wait_for_work():
                watch.begin()
                outputs = self._engine.step() if self._pause is None else self._rest()
                watch.end()
                self._publish(outputs)
                # Without this, the thread would keep the last requests and their adapters while it waits for work.
                del outputs
        # The thread's boundary. Not even SystemExit is lost: all requests end, then the process.
        except BaseException as failure:
            self._has_failed = True
            _log.exception("engine step failed", state=self._state_or_none())
            try:
                self._end(failed=True)
            finally:
                self._call_soon(self._on_failure, failure)
        else:
            self._end(failed=False)

    def _wait_for_work(self) -> bool:
        """Carry out the commands of the inbox; sleep while there is no command, and no work or work that rests.

        False: stop.
        """
        while True:
            with self._condition:
                while not (self._inbox or self._stopping):
                    seconds = self._seconds_to_rest()
                    if seconds == 0.0:
                        return True
                    self._condition.wait(seconds)
                if self._stopping:
                    return False
                self._take_inbox()
            self._run_commands()
            # A pause shows what the commands did at once, although no step follows.
            if self._pause is not None or not self._engine.rest_seconds():
                return True
            # No step follows the commands now.
            self._engine.watch.end()

    def _seconds_to_rest(self) -> float | None:
        """Return the seconds until there is something to do without a command; None: nothing but a command."""
        engine = self._engine
        if self._pause is not None:
            return max(min(self._pause[1], engine.next_end) - engine.now(), 0.0)
        return engine.rest_seconds() if engine.has_work else None

    def _rest(self) -> list[RequestOutput]:
        """Do what a pause leaves to do, in place of a step, and end it when its time is over."""
        assert self._pause is not None
        number, until = self._pause
        if self._engine.now() >= until:
            _log.warning("a pause lasted for as long as it may: the engine steps again")
            self._end_pause()
            self._call_soon(self._on_pause_over, number)
        return self._engine.end_overdue()

    def _end_pause(self) -> None:
        """End the present pause, if there is one, on the thread."""
        if self._pause is not None:
            self._pause = None
            self._engine.pause_ended()

    def _take_inbox(self) -> None:
        """Move commands out of the inbox. The condition is held."""
        self._commands.extend(self._inbox)
        self._inbox.clear()

    def _run_commands(self) -> None:
        if self._commands:
            # They may hang like a step.
            self._engine.watch.begin()
        while self._commands:
            self._commands.popleft()()

    def _publish(self, outputs: list[RequestOutput]) -> None:
        """Forget finished requests, and hand a step's outputs to the event loop."""
        outputs += self._refused
        self._refused = []
        load = self._engine.load()
        finished = [output.request.request_id for output in outputs if output.finished is not None]
        # Under one lock: whoever reads a last event may reuse its id, and whoever finds no live id has missed nothing.
        with self._condition:
            self._load, self._num_unseen = load, self._num_inbound
            while len(self._unseen) > self._num_unseen:
                tenant, tokens = self._unseen.popleft()
                self._count_unseen(tenant, -1, -tokens)
            self._live.difference_update(finished)
            if outputs:
                self._call_soon(self._deliver, load.step, outputs)

    def _end(self, *, failed: bool) -> None:
        """End the thread's work: every command and every live request gets its answer."""
        with self._condition:
            self._stopping = True
            self._take_inbox()
        self._run_commands()
        self._publish(self._engine.fail_all() if failed else self._engine.stop_all())

    def _call_soon(self, call: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            # Raised only when the event loop is closed: no reader is left.
            _log.warning("engine outputs after the event loop was closed", exc_info=True)


def _fulfil(future: Future[Result], call: Callable[[Engine], Result], engine: Engine) -> None:
    """Run `call` into `future`. Its errors go to the caller, who waits for the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call(engine))
    except BaseException as error:
        future.set_exception(error)
