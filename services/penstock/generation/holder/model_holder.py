"""The process's place for one model: it is loaded at the start or by a call, served, and unloaded by a call."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from penstock.common.errors import FailedPrecondition, Internal, Unavailable
from penstock.common.heap import trim_heap
from penstock.common.logging import get_logger
from penstock.common.progress import (
    LOAD_WEIGHTS,
    CancellableProgress,
    ShowProgress,
    StageProgress,
    StartCancelled,
    show_nothing,
)
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.load_order import LoadOrder
from penstock.generation.engine.loop import EngineLoop
from penstock.generation.holder.model_load import ModelLoad
from penstock.generation.holder.upload import UploadFolder, remove_leftovers, upload_parent
from penstock.generation.host.memory import resident_bytes
from penstock.generation.lifecycle import Lifecycle, ModelState
from penstock.generation.metrics import GenerationMetrics
from penstock.generation.running import RunningEngine
from penstock.generation.service import GenerationCore
from penstock.generation.startup.load import load
from penstock.generation.startup.loaded_model import LoadedModel
from penstock.generation.startup.preload import Begun

# Time that streams get to send their INTERNAL before a broken process goes, and to end before their model does.
END_STREAMS_SECONDS = 1.0
# Seconds that a thread has to give up loading before the process ends without it.
GIVE_UP_SECONDS = 2.0
# Seconds that an unload waits for calls that still hold the engine.
FREE_SECONDS = 5.0
_log = get_logger("penstock.generation")


@dataclass(frozen=True, slots=True)
class Unloaded:
    """A model that is gone, and the process's memory before and after."""

    name: str
    bytes_before: int
    bytes_after: int


class ModelHolder:
    """Holder of the model. Belongs to one event loop."""

    def __init__(self, config: GenerationServiceConfig, lifecycle: Lifecycle, metrics: GenerationMetrics) -> None:
        self.config = config
        # None while there is no model.
        self.running: RunningEngine | None = None
        # Progress of the process's start; a call's own goes to its caller.
        self.show: ShowProgress = show_nothing
        # Resolves when the process must end.
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._load: ModelLoad | None = None
        # Files of the present model, if they came as bytes.
        self._folder: UploadFolder | None = None
        self._starting: tuple[CancellableProgress, Future[LoadedModel]] | None = None
        self._unloading: asyncio.Task[Unloaded] | None = None
        self._failing: asyncio.Task[None] | None = None

    async def start(self, begun: Begun | None) -> None:
        """Load the model of the configuration, or begin without one. Raises StartupError."""
        config = self.config
        if config.is_model_open:
            await asyncio.to_thread(remove_leftovers, upload_parent(config.model_upload_folder))
        if config.empty:
            self.become_empty()
            await self._lifecycle.show_health()
            return
        began, progress = time.monotonic(), CancellableProgress()
        progress.show = self.show
        loading = self.load_on_thread(config, progress, begun)
        self._starting = progress, loading
        try:
            loaded = await asyncio.wrap_future(loading)
        except asyncio.CancelledError:
            progress.cancel()
            raise
        # It has the result, which would stay in memory with it.
        self._starting = None
        del loading
        self.begin(loaded, config, began, None)

    def begin_load(self, order: LoadOrder) -> ModelLoad:
        """Take the place for a load; `ModelLoad.end` gives it back.

        Raises FailedPrecondition (MODEL_LOADED, LOAD_IN_PROGRESS, MODEL_ROOT_OFF), Unavailable while the process stops,
        InvalidArgument naming the field, ResourceExhausted for files that are too large.
        """
        self._require_quiet()
        if self.running is not None:
            raise FailedPrecondition("this process has a model: unload it first", reason="MODEL_LOADED")
        load = ModelLoad(self, order, self._metrics.loads)
        self._lifecycle.begin_load(load.name)
        self._load = load
        return load

    async def unload(self, grace_seconds: float | None) -> Unloaded:
        """End the model and free all of it. A caller that leaves meanwhile does not stop that.

        `grace_seconds` is the time that live requests have before they are aborted; None: FailedPrecondition BUSY while
        there are some. Raises Unavailable NO_MODEL, FailedPrecondition LOAD_IN_PROGRESS, Internal when the engine's
        thread hangs.
        """
        self._require_quiet()
        hub = self._lifecycle.loaded().hub
        if grace_seconds is None and hub.num_live + hub.num_prepared:
            raise FailedPrecondition(
                "requests are live: give them grace_seconds, or drain the process first", reason="BUSY"
            )
        # A frame that waits would keep the engine.
        del hub
        # At once: nothing may be accepted before the task begins.
        self._lifecycle.begin_unload()
        self._unloading = asyncio.create_task(self._unload(grace_seconds))
        return await asyncio.shield(self._unloading)

    def fail(self, error: BaseException) -> None:
        """End every stream with INTERNAL, and then the process."""
        if self._failing is None:
            self._lifecycle.end()
            self._failing = asyncio.create_task(self._end_streams(error))

    async def close(self) -> None:
        """End a load, and the model with the requests that are still live. The process ends after it."""
        self._lifecycle.end()
        if self._starting is not None:
            progress, loading = self._starting
            progress.cancel()
            # Its error was the start's own, which told it.
            await _wait_for_load(asyncio.wrap_future(loading))
        if self._load is not None:
            await _wait_for_load(asyncio.ensure_future(self._load.end()))
        self._lifecycle.cancel_reload()
        if self._unloading is not None:
            self._unloading.cancel()
            await asyncio.gather(self._unloading, return_exceptions=True)
        if self.running is not None:
            self.running.stop_watching()
        if self._failing is not None:
            await self._failing
        # One that hangs must not keep the process from its end.
        if self.running is not None and not await self.running.stop():
            _log.error("the engine's thread hangs: the process ends without it")
        await self._remove_folder()

    def load_on_thread(
        self, config: GenerationServiceConfig, progress: CancellableProgress, begun: Begun | None = None
    ) -> Future[LoadedModel]:
        """Load on a thread of its own: with it go the threads that its kernels started. The process ends without it."""
        num_models, num_loaded = 1 + (config.assistant_model is not None) + (config.draft_head is not None), 0

        def note(stage: StageProgress) -> None:
            """Store the progress and show it. Called on the loading thread, and on those of a download."""
            nonlocal num_loaded
            if stage.stage == LOAD_WEIGHTS:
                part = 0.0 if stage.ended or not stage.total else stage.done / stage.total
                num_loaded += stage.ended
                self._lifecycle.note_percent(100.0 * (num_loaded + part) / num_models)
            self._lifecycle.note_stage(stage.stage)
            progress(stage)

        loading: Future[LoadedModel] = Future()
        # As an executor does: whoever no longer waits for it does not take its place.
        loading.set_running_or_notify_cancel()
        name = (*config.served_model_name, self._lifecycle.model_name)[0]

        def run() -> None:
            try:
                loaded = load(config, name, note, begun, progress.if_cancelled)
            except BaseException as error:
                loading.set_exception(error)
            else:
                loading.set_result(loaded)

        # Not of an executor, which would wait for it at the process's end.
        threading.Thread(target=run, name="load", daemon=True).start()
        return loading

    def begin(
        self, loaded: LoadedModel, config: GenerationServiceConfig, began: float, folder: UploadFolder | None
    ) -> GenerationCore:
        """Serve a loaded model. `began`: time.monotonic() of its load's begin; `folder`: its files, if they came as
        bytes, removed with the model."""
        lifecycle, loads = self._lifecycle, self._metrics.loads
        self._metrics.begin(lifecycle.model_name)
        running = RunningEngine(
            loaded,
            config,
            self._metrics,
            set_hung=lifecycle.set_hung,
            end_pause=lifecycle.end_pause,
            on_failure=self.fail,
            check_reload=self._check_running,
        )
        running.start()
        self.running, self._folder, self._load = running, folder, None
        lifecycle.serve(running.core)
        loads.loaded.set(1)
        loads.ends["loaded"].inc()
        loads.seconds.observe(time.monotonic() - began)
        return running.core

    async def show_health(self) -> None:
        """Show SERVING while the model takes work."""
        await self._lifecycle.show_health()

    async def give_up(self) -> None:
        """Free what a load that did not end well took, and the place."""
        await asyncio.to_thread(free_memory)
        self._load = None
        self.become_empty()

    def become_empty(self) -> None:
        """Note that there is no model."""
        self.running = None
        self._lifecycle.become_empty()
        self._metrics.loads.loaded.set(0)

    def _require_quiet(self) -> None:
        """Raise unless the place is free for a change."""
        lifecycle = self._lifecycle
        if lifecycle.is_stopping or lifecycle.has_ended:
            raise Unavailable("this process is stopping", reason="DRAINING")
        if self._load is not None or lifecycle.state is ModelState.LOADING:
            raise FailedPrecondition(
                "another load is under way: one at a time, and its caller may cancel it", reason="LOAD_IN_PROGRESS"
            )
        if self._unloading is not None:
            raise FailedPrecondition("the model is being unloaded: wait for that", reason="LOAD_IN_PROGRESS")
        if lifecycle.is_reloading:
            raise FailedPrecondition("a Reload is under way: wait for its end", reason="BUSY")

    def _check_running(self) -> None:
        """Raise StartCancelled once the process stops. Called on any thread."""
        if self._lifecycle.has_ended:
            raise StartCancelled

    async def _unload(self, grace_seconds: float | None) -> Unloaded:
        before, name = resident_bytes(), self._lifecycle.model_name
        engine = weakref.ref(self._lifecycle.loaded().loop)
        try:
            await self._end_model(grace_seconds)
            await _free(engine)
            self._metrics.loads.unloads.inc()
        finally:
            self._unloading = None
            if self.running is None:
                # Also where something broke after the model's end: the place is free for another.
                self._metrics.begin("")
                self.become_empty()
            self._lifecycle.end_unload()
        unloaded = Unloaded(name, before, resident_bytes())
        _log.info("unloaded", model=name, bytes_before=before, bytes_after=unloaded.bytes_after)
        return unloaded

    async def _end_model(self, grace_seconds: float | None) -> None:
        """End requests, streams and the engine, and drop them."""
        lifecycle, core, running = self._lifecycle, self._lifecycle.loaded(), self.running
        # Routers read it as a drain: they send new work elsewhere.
        await lifecycle.show_health()
        await core.finish(grace_seconds)
        await self._close_streams(core)
        if running is None or lifecycle.has_ended:
            raise Unavailable("this process is stopping", reason="DRAINING")
        if not await running.stop():
            error = Internal("the engine's thread hangs: the process ends", reason="ENGINE_FAILED")
            self.fail(error)
            raise error
        self.running = None
        lifecycle.drop_core()
        await self._remove_folder()

    async def _end_streams(self, error: BaseException) -> None:
        await self._lifecycle.show_health()
        core = self._lifecycle.core
        if core is not None:
            core.hub.fail_all(Internal("the engine of this process has failed", reason="ENGINE_FAILED"))
            await self._close_streams(core)
        if not self.failed.done():
            self.failed.set_result(error)

    @staticmethod
    async def _close_streams(core: GenerationCore) -> None:
        """End sessions and watches, and wait a moment for them."""
        core.hub.close_streams()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_STREAMS_SECONDS):
                await core.hub.wait_streams_closed()

    async def _remove_folder(self) -> None:
        if self._folder is not None:
            await asyncio.to_thread(self._folder.remove)
            self._folder = None


async def _free(engine: weakref.ref[EngineLoop]) -> None:
    """Free the memory of an engine that has ended: again while a call that ends late still holds it, as one does on a
    machine that is busy."""
    deadline = time.monotonic() + FREE_SECONDS
    while True:
        # Engine, loop and hub refer to each other.
        await asyncio.to_thread(free_memory)
        if engine() is None:
            return
        if time.monotonic() > deadline:
            _log.warning("something still holds the unloaded model: its memory is freed when that ends")
            return
        await asyncio.sleep(FREE_SECONDS / 100)


def free_memory() -> None:
    """Give the memory of a model that nothing uses any more back to the system."""
    if gc.get_freeze_count():
        # Objects that the process had at its start, its first model among them, are left out of collections.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    else:
        gc.collect()
    trim_heap()


async def _wait_for_load(load: asyncio.Future[Any]) -> None:
    """Wait until a load that was told to give up has, or hangs: in a library's call, or on a disk that does not
    answer."""
    _, hangs = await asyncio.wait([load], timeout=GIVE_UP_SECONDS)
    if hangs:
        _log.error("the load hangs: the process ends without it")
    elif not load.cancelled():
        # Marks its error as seen.
        load.exception()
