"""The engine and its event loop on a thread of their own, for callers without a loop, or with one of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from penstock.common.errors import Internal, PenstockError, ResourceExhausted, Unavailable
from penstock.common.logging import get_logger
from penstock.common.progress import ShowProgress
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.request import Request
from penstock.generation.delivery.hub import OutputHub
from penstock.generation.delivery.streams import LocalStream
from penstock.generation.engine.engine import Engine
from penstock.generation.metrics import GenerationMetrics
from penstock.generation.options.validate import check_model
from penstock.generation.running import RunningEngine
from penstock.generation.service import GenerationCore
from penstock.generation.startup.load import load
from penstock.generation.startup.loaded_model import LoadedModel
from penstock.generation.weights.new_tensors import NewTensors
from penstock.generation.wire.convert import Event, to_generate_options
from penstock.generator.argument_names import renaming
from penstock.generator.requests import LocalRequest
from penstock.tokenizer.bundle import TokenizerBundle
from penstock.tokenizer.local_bundle import load_local_bundle

_log = get_logger("penstock.generator")
# Time that the last words of live requests get when it closes.
_LAST_WORDS_SECONDS = 5.0
T = TypeVar("T")
Receive = Callable[[Request, Event], None]


class LocalEngine:
    """A running engine that any thread may call. Nothing runs any more after `close`, or once a step has failed."""

    def __init__(
        self, config: GenerationServiceConfig, name: str, max_in_flight: int | None, show: ShowProgress
    ) -> None:
        """Make it; `start` loads the model. `max_in_flight`: most requests in the engine at once, others wait for a
        place; None: twice the sequences that run at once."""
        self._config, self._name, self._show = config, name, show
        most = 2 * config.max_running_sequences if max_in_flight is None else max_in_flight
        self.max_in_flight = max(1, min(most, config.max_queued_requests))
        self._places = asyncio.Semaphore(self.max_in_flight)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="generator", daemon=True)
        self._running: RunningEngine | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._hung = False
        self._tasks: set[asyncio.Task[Any]] = set()
        # The last call that nobody waits for.
        self._soon: Future[Any] | None = None

    def start(self) -> None:
        """Load the model, and start the engine. Raises StartupError naming the option to change; nothing is left of it
        then."""
        self._thread.start()
        try:
            self.loaded: LoadedModel = load(self._config, self._name, self._show)
            self.call(self._start_engine())
        except BaseException:
            self.close()
            raise

    @property
    def core(self) -> GenerationCore:
        """The service's core. Raises Unavailable once it is closed or has failed, or while a step hangs."""
        if self._failure is not None:
            raise Unavailable("the engine has failed: make a new Generator", reason="ENGINE_FAILED")
        if self._closed or self._running is None:
            raise self._closed_error()
        if self._hung:
            raise Unavailable("a step of the engine hangs", reason="ENGINE_HUNG")
        return self._running.core

    def load_tokenizer(self) -> TokenizerBundle | None:
        """Return the tokenizer as transformers loads it, in a process that ends; None where it is not to be loaded.

        Raises StartupError.
        """
        folder = self.loaded.files.tokenizer_folder
        if folder is None:
            return None
        return self.call(load_local_bundle(folder))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the event loop and wait for it. A caller that is interrupted cancels it."""
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` on the event loop. Cancelling the future cancels it."""
        if threading.get_ident() == self._thread.ident:
            work.close()
            raise RuntimeError("the Generator's own thread cannot wait for itself")
        kept = self._kept(work)
        try:
            return asyncio.run_coroutine_threadsafe(kept, self._loop)
        except RuntimeError:
            # The event loop is closed.
            kept.close()
            work.close()
            raise self._closed_error() from None

    async def write_weights(self, tensors: NewTensors, model: str) -> int:
        """Put a caller's tensors in place of the model's own, between two steps; return the weights' version from now
        on. Raises as `WeightUpdates.check` and `WeightUpdates.write`, and NotFound for another model's name."""
        core = self.core
        of_draft = core.updates.is_of_draft(model, core.loaded)
        if not of_draft:
            check_model(model, core.loaded.served.name)
        with core.updates.alone():
            core.updates.check(tensors.specs(), core.loaded, of_draft=of_draft)
            written = await core.updates.write(tensors, of_draft=of_draft)
        self.loaded = core.loaded
        return written.version

    def on_engine(self, call: Callable[[Engine], T]) -> T:
        """Run `call(engine)` on the engine's thread between two steps, and wait for it. Raises what it raises."""
        return self.core.loop.run_on_engine(call).result()

    def soon(self, call: Callable[[Engine], Any]) -> None:
        """Run `call` on the engine's thread without waiting, unless nothing runs any more. Any thread, also one that
        collects garbage. Requests that are made later see what it did."""
        with contextlib.suppress(PenstockError):
            self._soon = self.core.loop.run_on_engine(call)

    async def run(self, local: LocalRequest, receive: Receive) -> None:
        """Run a request to its end; `receive` gets its events on the event loop.

        Waits for a place first. Cancelling it aborts the request. Raises what the request ends with.
        """
        async with self._places:
            with renaming(local.names):
                hub, stream = await self._submit(local, receive)
            try:
                await stream.ended
            finally:
                # Aborts the request if it is live.
                hub.detach(stream)

    async def _submit(self, local: LocalRequest, receive: Receive) -> tuple[OutputHub, LocalStream]:
        """Check a request, make what takes time, and hand it to the engine."""
        soon = self._soon
        if soon is not None and not soon.done():
            # A prefix that was let go of is room for this request.
            await asyncio.wait((asyncio.wrap_future(soon),))
        while True:
            core = self.core
            options = to_generate_options(local.message, core.limits)
            maker = core.prepare(options, None, local.own)
            maker.request.warnings = (*maker.request.warnings, *local.warnings)
            try:
                if core.takes_time(maker.request, options):
                    await core.complete(maker.request, options)
                stream = LocalStream(maker, receive)
                self.core.hub.submit(maker.request, stream)
            except ResourceExhausted as error:
                # Others of this process fill a queue: there is nobody else that could take it.
                if error.reason != "QUEUE_FULL" or error.retry_after_seconds is None:
                    raise
                await asyncio.sleep(error.retry_after_seconds)
                continue
            core.hub.attach(stream)
            return core.hub, stream

    def close(self) -> None:
        """End live requests, the engine's thread and the event loop. Calling it again is harmless."""
        if self._closed or not self._thread.is_alive():
            self._closed = True
            return
        self._closed = True
        if threading.get_ident() == self._thread.ident:
            # Garbage was collected on the very thread: it cannot wait for its own end.
            self._loop.create_task(self._end())
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join()

    @staticmethod
    def _closed_error() -> PenstockError:
        return Unavailable("the Generator is closed", reason="ENGINE_STOPPED")

    async def _kept(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`, which the end of the event loop cancels."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await work

    async def _start_engine(self) -> None:
        metrics = GenerationMetrics(CollectorRegistry(), self._name)
        self._running = RunningEngine(
            self.loaded, self._config, metrics, on_failure=self._fail, set_hung=self._set_hung
        )
        self._running.start()

    async def _set_hung(self, hung: bool) -> None:
        self._hung = hung

    def _fail(self, error: BaseException) -> None:
        """End every request: the engine is broken."""
        self._failure = error
        if self._running is not None:
            self._running.core.hub.fail_all(Internal("the engine has failed", reason="ENGINE_FAILED"))

    async def _end(self) -> None:
        running, self._running = self._running, None
        try:
            if running is not None:
                # One that hangs must not keep the caller.
                if not await running.stop():
                    _log.error("the engine's thread hangs: it ends with the process")
                # What the engine said last is delivered by now; what it never took ends here.
                running.core.hub.fail_all(self._closed_error())
            tasks = [task for task in self._tasks if task is not asyncio.current_task()]
            if tasks:
                await asyncio.wait(tasks, timeout=_LAST_WORDS_SECONDS)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        except Exception:
            _log.exception("the Generator did not close well")
        finally:
            self._loop.stop()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            with contextlib.suppress(RuntimeError):
                self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
