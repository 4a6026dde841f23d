"""A loaded model that runs: the one way to make an engine. The service and penstock.Generator stand on it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from penstock.common.environment import current_environment
from penstock.common.errors import FailedPrecondition, StartupError
from penstock.common.heap import trim_heap
from penstock.common.kept_running import kept_running
from penstock.common.logging import get_logger
from penstock.common.progress import StartCancelled
from penstock.generation.adapters.adapter_access import AdapterAccess
from penstock.generation.adapters.adapter_disk import AdapterDisk
from penstock.generation.adapters.figures import AdapterFigures
from penstock.generation.adapters.remote_adapters import RemoteAdapters
from penstock.generation.adapters.store import AdapterStore
from penstock.generation.attention.state_pool import StatePool
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.block_store import StoreFigures
from penstock.generation.core.request import RequestOutput
from penstock.generation.core.step import Runner
from penstock.generation.delivery.hub import OutputHub
from penstock.generation.delivery.watchdog import Watchdog
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.engine_listener import EngineListener
from penstock.generation.engine.failpoints import FailingRunner
from penstock.generation.engine.loop import EngineLoop
from penstock.generation.engine.status_log import StatusLog
from penstock.generation.engine.step_trace import StepTrace
from penstock.generation.engine.trace_file import TraceFile
from penstock.generation.grammar.compiler import GrammarCompiler
from penstock.generation.graphs.graph_limits import GraphLimits
from penstock.generation.graphs.model_access import ModelAccess
from penstock.generation.host.block_file_store import BlockFileStore
from penstock.generation.host.mapped import MappedFile, weights_written
from penstock.generation.metrics import EngineFigures, GenerationMetrics, GraphFigures, StateFigures
from penstock.generation.service import GenerationCore
from penstock.generation.startup.draft_model import DraftModel
from penstock.generation.startup.load_again import load_again
from penstock.generation.startup.load_weights import adapter_opener
from penstock.generation.startup.loaded_model import LoadedModel
from penstock.generation.startup.make_pools import opens_graphs
from penstock.generation.startup.replace_weights import replace_weights
from penstock.generation.startup.weight_updates import AppliedUpdate, WeightUpdates
from penstock.generation.weights.new_tensors import NewTensors

_log = get_logger("penstock.generation")
T = TypeVar("T")


class RunningEngine:
    """Engine with its thread, hub, watchdog and compiler of constraints. Belongs to the event loop that made it."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: GenerationServiceConfig,
        metrics: GenerationMetrics,
        *,
        on_failure: Callable[[BaseException], None],
        set_hung: Callable[[bool], Awaitable[None]],
        check_reload: Callable[[], None] = lambda: None,
        end_pause: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """Make the parts; `start` runs them. `on_failure` is called when a step has raised, or the watchdog has:
        nothing runs any more.

        `set_hung` is called with True when a step hangs, and with False when it ended after all; `check_reload` while
        weights are read again: it may raise StartCancelled; `end_pause` with the number of a pause that has lasted for
        as long as it may.
        """
        self._on_failure = on_failure
        self._end_pause = end_pause
        self._pause_end: asyncio.Future[None] | None = None
        self._check_reload = check_reload
        self._config = config
        self._metrics = metrics
        self._events = asyncio.get_running_loop()
        path = config.trace_steps
        self._trace = TraceFile(path, config.trace_bytes) if path else None
        engine = self._engine(loaded)
        stats = engine.stats

        def deliver(step: int, outputs: list[RequestOutput]) -> None:
            for sample in stats.drain_steps():
                metrics.step(sample)
            hub.deliver(step, outputs)

        nice = config.niceness(on_cpu=loaded.weights.device.torch_device.type == "cpu")
        loop = EngineLoop(engine, self._events, deliver, self._engine_failed, nice=nice, on_pause_over=self._pause_over)
        hub = OutputHub(loop, metrics, lambda: stats.steps, loaded.weights.adapters)
        self._loop = loop
        self._watchdog = Watchdog(loop, hub, loaded.engine.config.heartbeat_seconds, set_hung)
        self._watchdog_task: asyncio.Task[None] | None = None
        self.status = StatusLog(loop, stats, config.status_seconds)
        self._watch: asyncio.Task[None] | None = None
        # No reload reads the draft model again.
        own = loaded.files.folder
        self._draft_files = tuple(one for one in loaded.weights.device.mapped_files if one.path.parent != own)
        self._compiler = _compiler(loaded, config)
        self.core = GenerationCore(
            config=config,
            loaded=loaded,
            loop=loop,
            hub=hub,
            stats=stats,
            compiler=self._compiler,
            adapter_access=AdapterAccess(
                loaded.weights.adapters,
                config.adapter_folder(),
                on_change=hub.notify,
                on_failure=metrics.adapter_failed,
                remote=_remote_adapters(config, loaded.weights.adapters),
            ),
            reload=self.reload,
            updates=WeightUpdates(config, self._write_weights),
            access=self._open_access(loaded, loop, hub),
        )

    def start(self) -> None:
        """Start the engine's thread, and what watches it, the weights' files and the other ranks."""
        loaded, loop, stats = self.core.loaded, self._loop, self.core.stats
        # What is asked for later must not keep the first weights after others took their place.
        disk = loaded.pools.disk
        self._metrics.read_adapters(loaded.weights.adapters.figures, loaded.weights.adapters.infos)
        self._metrics.read_engine(
            lambda: EngineFigures(loop.load, stats, loop.step_in_progress, _stored(disk), loop.is_paused),
            loaded.pools.kv.bytes_per_block,
            partial(_states, loaded.pools.kv.states),
            [group.name for group in loaded.engine.config.block_groups],
        )
        if self._trace is not None:
            self._trace.start()
        loop.start()
        self._watchdog_task = asyncio.create_task(self._watchdog.run())
        self._watchdog_task.add_done_callback(self._watchdog_ended)
        self.status.start()
        self._watch_mapped(loaded)
        if loaded.weights.ranks is not None:
            events = self._events
            loaded.weights.ranks.on_loss = lambda error: _call_soon(events, partial(self._on_failure, error))

    def _engine(self, loaded: LoadedModel) -> Engine:
        """Make the engine of the model's parts. It knows how long steps took at the start."""
        parts = loaded.engine
        listeners: list[EngineListener] = []
        if self._trace is not None:
            listeners.append(StepTrace(parts.config, self._trace, time.monotonic()))
        drafter = None if parts.draft is None else parts.draft.drafter
        token_bytes = loaded.files.token_bytes
        engine = Engine(
            parts.config,
            self._runner(loaded),
            token_bytes,
            drafter=drafter,
            listeners=listeners,
            store=loaded.pools.disk,
        )
        engine.device_blocks.on_grow = loaded.pools.kv.leave_small_pages
        # The first steps of a slow model must not seem to hang.
        for rows, seconds in parts.batch.measured:
            engine.watch.note(rows, seconds)
            engine.policy.stepped(rows, seconds)
        return engine

    async def reload(self) -> None:
        """Put weights that are read again in place of the core's, while no request is live.

        Raises FailedPrecondition (RELOAD_FAILED; BUSY while Forward streams or leases hold the model): the old ones
        stay then.
        """
        with self.core.updates.alone():
            await self._reload()

    async def _reload(self) -> None:
        core = self.core
        self._require_unheld()
        try:
            fresh = await asyncio.to_thread(load_again, self._config, core.loaded, lambda *_: self._check_reload())
        except (StartupError, StartCancelled, OSError) as error:
            message = error.message if isinstance(error, StartupError) else "the process stops, or its files are gone"
            _log.error("the model was not reloaded", cause=str(error))
            raise FailedPrecondition(f"the model was not reloaded: {message}", reason="RELOAD_FAILED") from error
        runner = self._runner(fresh)

        def change(engine: Engine) -> None:
            engine.reinitialise(runner, fresh.engine.warm_up)
            fresh.engine.follow(fresh.weights.model)

        await asyncio.wrap_future(core.loop.run_on_engine(change))
        await self._renew(fresh)
        _log.info("reloaded", weights_bytes=fresh.weights.model.num_bytes)

    async def _write_weights(self, tensors: NewTensors, of_draft: bool) -> AppliedUpdate:
        """Put checked tensors in place of the model's own, or of its draft model's, between two steps.

        Live requests go on. Raises FailedPrecondition BUSY while Forward streams or leases hold the model,
        InvalidArgument naming a tensor, Unavailable ENGINE_STOPPED; the old weights stay then.
        """
        core, begun = self.core, time.monotonic()
        self._require_unheld()
        fresh = await asyncio.to_thread(replace_weights, self._config, core.loaded, tensors, of_draft=of_draft)
        if of_draft:
            return await self._change_drafts(fresh, tensors.num_bytes, begun)
        prepared = time.monotonic()
        self._require_unheld()
        runner, model = core.loaded.engine.runner, fresh.weights.model

        def change(engine: Engine) -> tuple[int, float]:
            paused = time.monotonic()
            runner.change_weights(model)
            fresh.engine.follow(model)
            return engine.weights_changed(), time.monotonic() - paused

        version, pause = await asyncio.wrap_future(core.loop.run_on_engine(change))
        await self._renew(fresh)
        metrics = self._metrics.weights
        metrics.written_bytes.inc(tensors.num_bytes)
        metrics.pause.observe(pause)
        _log.info("weights written", version=version, bytes=tensors.num_bytes, pause_seconds=pause)
        return AppliedUpdate(version, tensors.num_bytes, prepared - begun, pause)

    async def _change_drafts(self, fresh: LoadedModel, num_bytes: int, begun: float) -> AppliedUpdate:
        """Draft by other weights, between two steps. Answers stay the same, and so does the version of the weights."""
        core, prepared, drafts = self.core, time.monotonic(), fresh.engine.draft
        assert isinstance(drafts, DraftModel)

        def change(engine: Engine) -> tuple[int, float]:
            paused = time.monotonic()
            drafts.runner.change_weights(drafts.model)
            # Rows that the old weights computed would make worse drafts.
            drafts.drafter.clear()
            return engine.weights_version, time.monotonic() - paused

        version, pause = await asyncio.wrap_future(core.loop.run_on_engine(change))
        core.loaded = fresh
        self._metrics.weights.written_bytes.inc(num_bytes)
        _log.info("draft weights written", bytes=num_bytes, pause_seconds=pause)
        await asyncio.to_thread(trim_heap)
        return AppliedUpdate(version, num_bytes, prepared - begun, pause)

    async def _renew(self, fresh: LoadedModel) -> None:
        """Serve other weights, which the engine has by now, and let the old ones go."""
        core = self.core
        core.renew(fresh, self._open_access(fresh, core.loop, core.hub))
        self._metrics.weights.version.set(core.weights_version)
        self._watch_mapped(fresh)
        # Nothing may keep the old weights in memory, or an adapter that fits only them. An adapter may be being read.
        await asyncio.to_thread(fresh.weights.adapters.open_by, adapter_opener(self._config, fresh.weights.model))
        core.hub.notify()
        await asyncio.to_thread(trim_heap)

    def _require_unheld(self) -> None:
        access = self.core.access
        if access is not None and access.is_in_use:
            raise FailedPrecondition("Forward streams or leases hold the model: end them first", reason="BUSY")

    def _pause_over(self, number: int) -> None:
        if self._end_pause is not None:
            self._pause_end = asyncio.ensure_future(self._end_pause(number))

    def dump_soon(self) -> None:
        """Log the engine's state soon."""
        self.status.dump_soon()

    async def stop(self) -> bool:
        """End the watches, the compiler and the engine's thread; requests that are still live end.

        False: the thread hangs, and nothing of the model can be freed.
        """
        self.core.updates.cancel()
        self.stop_watching()
        access = self.core.access
        if access is not None:
            access.close()
        await self._compiler.close()
        has_stopped = await _beside(partial(self._loop.stop, self._config.hung_step_seconds))
        if has_stopped:
            await self._close_pools()
        self.core.adapter_access.close()
        await _beside(self.core.loaded.weights.close)
        if self._trace is not None:
            await _beside(self._trace.close)
        # All of these would hold the model: metrics, and Forward streams that are open without a call.
        self._metrics.read_engine(EngineFigures)
        self._metrics.read_adapters(AdapterFigures, tuple)
        if access is not None:
            self._metrics.graphs.read(GraphFigures)
            access.release()
        return has_stopped

    async def _close_pools(self) -> None:
        """Write what the pools keep to the file of blocks, if there is one, and close it."""
        try:
            saved = await _beside(self._loop.save_prefixes)
            if saved:
                _log.info("prefixes were written to the file of blocks", prefixes=saved)
        except Exception as error:
            _log.warning("prefixes were not written to the file of blocks", exc_info=error)
        await _beside(self.core.loaded.pools.close)

    def stop_watching(self) -> None:
        """End the watches and the log lines: the engine is about to be ended, or has failed."""
        for task in (self._watch, self._watchdog_task):
            if task is not None:
                task.cancel()
        self.status.stop()

    def _watch_mapped(self, loaded: LoadedModel) -> None:
        """Watch the files that the weights of `loaded` and the draft model are mapped from, and no others any more."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        files = tuple({*loaded.weights.device.mapped_files, *self._draft_files})
        if files and self._config.weights_check_seconds:
            seconds = self._config.weights_check_seconds
            self._watch = asyncio.create_task(
                kept_running(lambda: self._watch_weights(files), _log, "watch of weights", seconds)
            )

    async def _watch_weights(self, files: Sequence[MappedFile]) -> None:
        error = await weights_written(files, self._config.weights_check_seconds)
        _log.error("weights were written to", cause=str(error))
        self._on_failure(error)

    def _runner(self, loaded: LoadedModel) -> Runner:
        orders = self._config.failpoint_orders()
        if not orders:
            return loaded.engine.runner
        _log.warning("this process fails on purpose", failpoints=self._config.failpoints)
        return FailingRunner(loaded.engine.runner, orders)

    def _open_access(self, loaded: LoadedModel, loop: EngineLoop, hub: OutputHub) -> ModelAccess | None:
        config = self._config
        if not opens_graphs(config, loaded.weights.model):
            return None
        limits = GraphLimits.of(config, loaded.served.max_context_tokens, loaded.engine.config.queue_full_retry_seconds)
        access = ModelAccess(loaded, config.request_limits(), limits, loop, hub.wait_idle, self._metrics.graphs)
        self._metrics.graphs.read(access.figures)
        return access

    def _watchdog_ended(self, watchdog: asyncio.Task[None]) -> None:
        """Fail when the watchdog broke: without heartbeats routers would take the process for dead."""
        if not watchdog.cancelled() and (error := watchdog.exception()) is not None:
            _log.error("the watchdog has failed", exc_info=error)
            self._on_failure(error)

    def _engine_failed(self, error: BaseException) -> None:
        _log.error("the engine has failed", exc_info=error)
        self._on_failure(error)


def _remote_adapters(config: GenerationServiceConfig, store: AdapterStore) -> RemoteAdapters | None:
    """Return the adapters of --adapter-store; None without one."""
    stores, root = config.allowed_stores(), config.adapter_folder()
    if not stores or root is None:
        return None
    disk = AdapterDisk(
        root,
        max_bytes=config.adapter_disk_bytes(),
        seconds=config.adapter_fetch_seconds,
        environment=current_environment(),
    )
    return RemoteAdapters(store, disk, stores)


def _stored(disk: BlockFileStore | None) -> StoreFigures:
    return StoreFigures() if disk is None else disk.figures()


def _states(states: StatePool | None) -> StateFigures:
    return StateFigures() if states is None else StateFigures(states.num_slots, states.num_used)


async def _beside(call: Callable[[], T]) -> T:
    """Run a blocking call on another thread; here where the interpreter ends, which lends no threads any more."""
    try:
        return await asyncio.to_thread(call)
    except RuntimeError:
        return call()


def _compiler(loaded: LoadedModel, config: GenerationServiceConfig) -> GrammarCompiler:
    folder = loaded.files.tokenizer_folder or loaded.files.folder
    return GrammarCompiler(folder, loaded.served.vocab_size, config.grammar_limits(), loaded.files.token_bytes)


def _call_soon(events: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Let an event loop make a call; one that is closed needs none."""
    with contextlib.suppress(RuntimeError):
        events.call_soon_threadsafe(call)
