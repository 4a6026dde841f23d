"""The generation process: it loads one model, serves it, drains, and ends with an error when the engine fails.

Order of start: servicers answer at once (loading), the model loads on a thread, the engine's thread starts, ready. With
`--empty` the process is ready without a model.
Order of stop: new work is refused, live requests finish, sessions and watches end, the server stops, the engine's
thread is joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Mapping

import grpc
from prometheus_client import CollectorRegistry

from penstock.common.checkpoint import model_name
from penstock.common.credentials import BearerTokens, TokenFile, TokenFiles
from penstock.common.logging import get_logger
from penstock.common.progress import ShowProgress
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.holder.model_holder import ModelHolder
from penstock.generation.lifecycle import Lifecycle
from penstock.generation.metrics import GenerationMetrics
from penstock.generation.rpc.admin import AdminServicer
from penstock.generation.rpc.generation import GenerationServicer
from penstock.generation.rpc.graph_calls import FACTS_METHOD, OPENING_METHODS
from penstock.generation.rpc.model import ModelServicer
from penstock.generation.startup.preload import Begun
from penstock.v1 import admin_pb2_grpc, generation_pb2_grpc, model_pb2_grpc

GENERATION_SERVICE = "penstock.v1.GenerationService"
# They answer without a model, too.
CONTROL_SERVICES = ("penstock.v1.ModelService", "penstock.v1.GenerationAdminService")
_log = get_logger("penstock.generation")


class GenerationApp:
    """Generation service of one process (serving.server.Service and HasTokens)."""

    name = "generation"
    control_services: tuple[str, ...] = CONTROL_SERVICES
    grpc_services: tuple[str, ...] = (GENERATION_SERVICE, *CONTROL_SERVICES)

    def __init__(
        self, config: GenerationServiceConfig, registry: CollectorRegistry, begun: Begun | None = None
    ) -> None:
        """Make the service, on the event loop. `begun`: the result of `preload.begin`, if it was called."""
        self._config = config
        self._begun = begun
        if config.vllm_engine:
            # Here and below: its messages are imported by those who asked for it.
            from penstock.compat.vllm.engine_servicer import VLLM_ENGINE_SERVICE

            self.grpc_services = (*self.grpc_services, VLLM_ENGINE_SERVICE)
        name, *aliases = [""] if config.empty else config.served_model_name or [model_name(config.model)]
        self._lifecycle = Lifecycle(name, aliases=tuple(aliases))
        self._metrics = GenerationMetrics(registry, name)
        if config.vllm_engine:
            from penstock.compat.vllm.engine_metrics import VllmEngineMetrics

            registry.register(VllmEngineMetrics(self._lifecycle, config.max_adapters))
        self._holder = ModelHolder(config, self._lifecycle, self._metrics)
        self.failed = self._holder.failed

    def bind_health(self, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        """Let Drain, Resume and the model's life turn health off and on by `set_serving`."""
        self._lifecycle.bind_health(set_serving)

    def bind_progress(self, show: ShowProgress) -> None:
        """Show the progress of the start by `show`."""
        self._holder.show = show

    def token_files(self) -> Mapping[str, BearerTokens]:
        path, usual = self._config.model_access_token_file, self._config.auth_token_file
        if path is None:
            return {}
        opening = TokenFile(path, "--model-access-token-file")
        tokens: dict[str, BearerTokens] = dict.fromkeys(OPENING_METHODS, opening)
        if usual is not None:
            # Callers that run the model's graphs have to know them.
            tokens[FACTS_METHOD] = TokenFiles((TokenFile(usual, "--auth-token-file"), opening))
        return tokens

    def register(self, server: grpc.aio.Server) -> None:
        """Add the three servicers, and vLLM's where it is asked for."""
        lifecycle = self._lifecycle
        generation = GenerationServicer(lifecycle, self._metrics)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        model = ModelServicer(lifecycle, self._holder, self._config)
        model_pb2_grpc.add_ModelServiceServicer_to_server(model, server)
        admin_pb2_grpc.add_GenerationAdminServiceServicer_to_server(AdminServicer(lifecycle), server)
        if self._config.vllm_engine:
            from penstock.compat.vllm.engine_servicer import VllmEngineServicer
            from penstock.engines import vllm_engine_pb2_grpc

            engine = VllmEngineServicer(lifecycle, self._metrics)
            vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, server)

    async def start(self) -> None:
        """Load the model, warm up, and start the engine; with --empty only take calls. Raises StartupError."""
        # Off the main thread, as in some tests, there are no signals.
        with contextlib.suppress(ValueError, RuntimeError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._log_state)
        begun, self._begun = self._begun, None
        await self._holder.start(begun)

    def _log_state(self) -> None:
        """Log the state of the engine, on SIGUSR1."""
        if self._holder.running is not None:
            self._holder.running.status.dump_soon()
        elif self._lifecycle.model_name:
            # A warning, like the state itself.
            _log.warning("the model is still loading", percent=self._lifecycle.percent_loaded)
        else:
            _log.warning("there is no model")

    async def drain(self) -> None:
        """Refuse new work, wait for live requests, end the sessions."""
        self._lifecycle.stop()
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
        await self._holder.close()

    def status_lines(self) -> list[str]:
        """Return lines on model and pool."""
        core = self._lifecycle.core
        if core is not None:
            return core.loaded.status_lines()
        return ["model     none: `penstock models load` brings one"] if self._config.empty else []
