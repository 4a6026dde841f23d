"""The generation process: it loads one model, serves it, drains, and ends with an error when the engine fails.

Order of start: servicers answer at once (loading), the model loads on a thread, the engine's thread starts, ready.
Order of stop: new work is refused, live requests finish, sessions and watches end, the server stops, the engine's
thread is joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence

import grpc
from prometheus_client import CollectorRegistry

from penstock.common.checkpoint import model_name
from penstock.common.errors import Internal
from penstock.common.logging import get_logger
from penstock.common.progress import LOAD_WEIGHTS, CancellableProgress, ShowProgress, StageProgress
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.request import RequestOutput
from penstock.generation.core.step import Runner
from penstock.generation.delivery.hub import OutputHub
from penstock.generation.delivery.watchdog import Watchdog
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.failpoints import FailingRunner
from penstock.generation.engine.loop import EngineLoop
from penstock.generation.engine.status_log import StatusLog
from penstock.generation.engine.trace_file import TraceFile
from penstock.generation.grammar.compiler import GrammarCompiler
from penstock.generation.host.arena import Arena
from penstock.generation.host.mapped import MappedFile, weights_written
from penstock.generation.metrics import EngineFigures, GenerationMetrics
from penstock.generation.rpc.admin import AdminServicer
from penstock.generation.rpc.generation import GenerationServicer
from penstock.generation.rpc.model import ModelServicer
from penstock.generation.service import GenerationCore, Lifecycle, ModelState, WatermarkCalls
from penstock.generation.startup.load import LoadedModel, load
from penstock.generation.wire.embeds_intake import EmbedsIntake
from penstock.v1 import admin_pb2_grpc, generation_pb2_grpc, model_pb2_grpc

# Time that streams get to send their INTERNAL before a broken process goes.
END_STREAMS_SECONDS = 1.0
_log = get_logger("penstock.generation")


class GenerationApp:
    """Generation service of one process (serving.server.Service)."""

    name = "generation"
    grpc_services: tuple[str, ...] = (
        "penstock.v1.GenerationService",
        "penstock.v1.ModelService",
        "penstock.v1.GenerationAdminService",
    )

    def __init__(
        self, config: GenerationServiceConfig, registry: CollectorRegistry, arena: Arena | None = None
    ) -> None:
        """Make the service, on the event loop. `arena`: the result of `preload.begin`, if it was called."""
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._config = config
        self._arena = arena
        self._lifecycle = Lifecycle(config.served_model_name or model_name(config.model))
        self._metrics = GenerationMetrics(registry, self._lifecycle.model_name)
        self._progress = CancellableProgress()
        # Models, the draft model among them, and those whose weights are loaded.
        self._num_models = 1 if config.assistant_model is None else 2
        self._num_loaded = 0
        self._engine_loop: EngineLoop | None = None
        self._status: StatusLog | None = None
        self._trace: TraceFile | None = None
        self._compiler: GrammarCompiler | None = None
        self._watch: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._failing: asyncio.Task[None] | None = None

    def bind_health(self, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        """Let Drain and Resume turn health off and on by `set_serving`."""
        self._lifecycle.set_serving = set_serving

    def bind_progress(self, show: ShowProgress) -> None:
        """Let the start show its progress by `show`."""
        self._progress.show = show

    def register(self, server: grpc.aio.Server) -> None:
        """Add the three servicers."""
        lifecycle = self._lifecycle
        generation = GenerationServicer(lifecycle, self._metrics)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(
            ModelServicer(lifecycle, self._config.max_message_bytes), server
        )
        admin_pb2_grpc.add_GenerationAdminServiceServicer_to_server(AdminServicer(lifecycle), server)

    async def start(self) -> None:
        """Load the model, warm up, and start the engine. Raises StartupError."""
        # Off the main thread, as in some tests, there are no signals.
        with contextlib.suppress(ValueError, RuntimeError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._log_state)
        try:
            loaded = await asyncio.to_thread(load, self._config, self._lifecycle.model_name, self._note, self._arena)
        except asyncio.CancelledError:
            self._progress.cancel()
            raise
        self._lifecycle.core = self._start_engine(loaded)
        self._lifecycle.percent_loaded = 100.0
        self._lifecycle.state = ModelState.READY
        if loaded.device.mapped_files and self._config.weights_check_seconds:
            self._watch = asyncio.create_task(self._watch_weights(loaded.device.mapped_files))

    async def _watch_weights(self, files: Sequence[MappedFile]) -> None:
        error = await weights_written(files, self._config.weights_check_seconds)
        _log.error("weights were written to", cause=str(error))
        self._fail(error)

    def _log_state(self) -> None:
        """Log the state of the engine, on SIGUSR1."""
        if self._status is None:
            # A warning, as the state itself.
            _log.warning("the model is still loading", percent=self._lifecycle.percent_loaded)
        else:
            self._status.dump_soon()

    def _note(self, progress: StageProgress) -> None:
        """Store the progress and show it. Called on the loading thread, and on those of a download."""
        if progress.stage == LOAD_WEIGHTS:
            part = 0.0 if progress.ended or not progress.total else progress.done / progress.total
            self._num_loaded += progress.ended
            self._lifecycle.percent_loaded = 100.0 * (self._num_loaded + part) / self._num_models
        self._progress(progress)

    def _start_engine(self, loaded: LoadedModel) -> GenerationCore:
        drafter = None if loaded.draft is None else loaded.draft.drafter
        path = self._config.trace_steps
        trace = self._trace = TraceFile(path, self._config.trace_bytes) if path else None
        runner: Runner = loaded.runner
        if orders := self._config.failpoint_orders():
            _log.warning("this process fails on purpose", failpoints=self._config.failpoints)
            runner = FailingRunner(runner, orders)
        engine = Engine(loaded.engine_config, runner, loaded.token_bytes, drafter=drafter, trace=trace)
        # The first steps of a slow model must not seem to hang.
        for rows, seconds in loaded.batch.measured:
            engine.watch.note(rows, seconds)
        stats, metrics = engine.stats, self._metrics

        def deliver(step: int, outputs: list[RequestOutput]) -> None:
            for sample in stats.drain_steps():
                metrics.step(sample)
            hub.deliver(step, outputs)

        nice = self._config.compute_nice
        loop = EngineLoop(engine, asyncio.get_running_loop(), deliver, self._engine_failed, nice=nice)
        hub = OutputHub(loop, metrics, lambda: stats.steps)
        metrics.read_engine(lambda: EngineFigures(loop.load, stats, loop.step_in_progress))
        loop.start()
        self._engine_loop = loop
        watchdog = Watchdog(loop, hub, loaded.engine_config.heartbeat_seconds, self._lifecycle.set_hung)
        self._watchdog = asyncio.create_task(watchdog.run())
        self._watchdog.add_done_callback(self._watchdog_ended)
        self._status = StatusLog(loop, stats, self._config.status_seconds)
        self._status.start()
        compiler = self._compiler = _compiler(loaded, self._config)
        retry_seconds = loaded.engine_config.queue_full_retry_seconds
        return GenerationCore(
            loaded,
            compiler,
            self._config.request_limits(),
            loop,
            hub,
            stats,
            self._config.max_pending_messages,
            self._config.max_items_in_flight,
            WatermarkCalls(self._config.max_watermark_calls, retry_seconds),
            EmbedsIntake(
                str(loaded.model.dtype).removeprefix("torch."),
                loaded.engine_config.block_size,
                self._config.max_live_embeds_bytes,
                retry_seconds,
            ),
        )

    def _watchdog_ended(self, watchdog: asyncio.Task[None]) -> None:
        """End the process when its watchdog broke: without heartbeats routers would take it for dead."""
        if not watchdog.cancelled() and (error := watchdog.exception()) is not None:
            _log.error("the watchdog has failed", exc_info=error)
            self._fail(error)

    def _engine_failed(self, error: BaseException) -> None:
        """End the process: the engine's step has raised."""
        _log.error("the engine has failed", exc_info=error)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End every stream with INTERNAL, and then the process."""
        if self._failing is not None:
            return
        self._lifecycle.state = ModelState.UNAVAILABLE
        self._failing = asyncio.create_task(self._end_streams(error))

    async def _end_streams(self, error: BaseException) -> None:
        await self._lifecycle.show_health()
        core = self._lifecycle.core
        if core is not None:
            core.hub.fail_all(Internal("the engine of this process has failed", reason="ENGINE_FAILED"))
            core.hub.close_streams()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(core.hub.wait_streams_closed(), END_STREAMS_SECONDS)
        if not self.failed.done():
            self.failed.set_result(error)

    async def drain(self) -> None:
        """Refuse new work, wait for live requests, end the sessions."""
        self._lifecycle.stopping = True
        self._lifecycle.start_drain()
        core = self._lifecycle.core
        if core is None:
            return
        try:
            await core.hub.wait_idle()
        except asyncio.CancelledError:
            # The grace is over.
            core.hub.end_streams_for_good()
            raise
        core.hub.close_streams()

    async def close(self) -> None:
        """Stop the engine's thread; requests that are still live end."""
        self._progress.cancel()
        self._lifecycle.state = ModelState.UNAVAILABLE
        for task in (self._watch, self._watchdog):
            if task is not None:
                task.cancel()
        if self._status is not None:
            self._status.stop()
        if self._failing is not None:
            await self._failing
        if self._compiler is not None:
            await self._compiler.close()
        # One that hangs must not keep the process from its end.
        if self._engine_loop is not None and not await asyncio.to_thread(
            self._engine_loop.stop, self._config.hung_step_seconds
        ):
            _log.error("the engine's thread hangs: the process ends without it")
        if self._trace is not None:
            await asyncio.to_thread(self._trace.close)

    def status_lines(self) -> list[str]:
        """Return lines on model and pool."""
        core = self._lifecycle.core
        return core.loaded.status_lines() if core is not None else []


def _compiler(loaded: LoadedModel, config: GenerationServiceConfig) -> GrammarCompiler:
    return GrammarCompiler(loaded.folder, loaded.served.vocab_size, config.grammar_limits(), loaded.token_bytes)
