"""Router process: it connects to tokenizers and backends, then serves TextService and forwards admin calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import grpc
from prometheus_client import CollectorRegistry

from penstock.common.credentials import BearerTokens, TokenFile, check_channel_files
from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.compat.kserve.inference_service import KSERVE_SCOPES, KSERVE_SERVICE, KserveServicer
from penstock.inference import kserve_pb2_grpc
from penstock.router.aio import Wakeup
from penstock.router.backends.discovery import Resolver, check_services, resolve
from penstock.router.config import RouterConfig
from penstock.router.frontend.catalogue import Catalogue
from penstock.router.frontend.forwarding import (
    ADMIN_SERVICE,
    MODEL_SERVICE,
    ROUTER_ADMIN_SERVICE,
    Forwarding,
    ForwardingAdminServicer,
    ForwardingModelServicer,
    token_files,
)
from penstock.router.frontend.key_scopes import key_token_files
from penstock.router.frontend.model_roll import ModelRoll
from penstock.router.frontend.models_watch import ModelsWatch
from penstock.router.frontend.route_table import RouteTable
from penstock.router.frontend.routed_model import RoutedModel, RouteShare
from penstock.router.frontend.router_admin import RouterAdminServicer
from penstock.router.frontend.servicer import TextServicer
from penstock.router.frontend.turn_limiter import TurnLimiter
from penstock.router.keys.key_desk import KeyDesk
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.delta_pace import DeltaPace
from penstock.v1 import admin_pb2_grpc, model_pb2_grpc, router_pb2_grpc, text_pb2_grpc

SERVICE_NAME = "penstock.v1.TextService"
_log = get_logger("penstock.router")


class RouterApp:
    """The router as a service. Implements serving.server.Service, ControlsHealth and HasTokens."""

    name = "router"
    grpc_services: tuple[str, ...] = (SERVICE_NAME, KSERVE_SERVICE, ADMIN_SERVICE, MODEL_SERVICE, ROUTER_ADMIN_SERVICE)

    def __init__(self, config: RouterConfig, registry: CollectorRegistry, *, resolver: Resolver = resolve) -> None:
        """Make it inside the event loop that will serve it. `resolver` stands in for DNS in tests.

        Raises StartupError for the file of keys.
        """
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []
        self._set_serving: Callable[[bool], Awaitable[None]] | None = None
        self._health_changed = Wakeup()
        metrics = self._metrics = RouterMetrics(registry)
        self._keys: KeyDesk | None = None
        if config.keys_file is not None:
            usual = config.auth_token_file
            others = TokenFile(usual, "--auth-token-file") if usual is not None else None
            self._keys = KeyDesk(config, registry, others)
        self._catalogue = Catalogue(config, metrics) if config.models is not None else None
        self._roll = ModelRoll(self._catalogue)
        share = RouteShare(
            config,
            metrics,
            TurnLimiter(config.writes_per_turn),
            DeltaPace(config.max_gather_seconds),
            on_change=self._health_changed.set,
            on_failure=self._fail,
            resolver=resolver,
            catalogue=self._catalogue,
            keys=self._keys,
        )
        self._table = RouteTable(
            lambda entry: RoutedModel(share, entry),
            config.drain_grace_seconds,
            config.start_timeout_seconds,
            self._keys,
        )
        self._watch = ModelsWatch(config, self._table) if config.models is not None else None
        metrics.live.set_function(lambda: sum(route.admission.live for route in self._table.routes))
        metrics.waiting.set_function(lambda: sum(route.admission.waiting for route in self._table.routes))
        metrics.tokenizer_up.set_function(self._are_tokenizers_up)

    def bind_health(self, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        self._set_serving = set_serving

    def register(self, server: grpc.aio.Server) -> None:
        """Add TextService, KServe's service, and the services that are forwarded to backends."""
        table, config = self._table, self._config
        text_pb2_grpc.add_TextServiceServicer_to_server(TextServicer(table, self._metrics), server)
        kserve = KserveServicer(table, self._metrics, config.kserve_stream_requests)
        kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(kserve, server)
        forwarding = Forwarding(config, lambda: table.backends)
        admin_pb2_grpc.add_GenerationAdminServiceServicer_to_server(ForwardingAdminServicer(forwarding), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ForwardingModelServicer(forwarding), server)
        admin = RouterAdminServicer(forwarding, table, self._watch, self._roll, self._keys)
        router_pb2_grpc.add_RouterAdminServiceServicer_to_server(admin, server)

    def token_files(self) -> Mapping[str, BearerTokens]:
        if self._keys is None:
            return token_files(self._config)
        return key_token_files(self._config, self._keys.ring, KSERVE_SCOPES)

    async def start(self) -> None:
        """Return once tokenizer and a backend are ready, with a file of models those of each, as far as they come.

        Raises StartupError for a file, --tokenizer or --backend; for --models when no model is ready in time.
        """
        # Checked only at the start: later a file may be missing while it is replaced, and connecting is tried again.
        check_channel_files(self._config)
        until = time.monotonic() + self._config.start_timeout_seconds
        if self._keys is not None:
            await self._keys.open()
            self._spawn(self._keys.run())
        file = await self._watch.read() if self._watch is not None else None
        models = file.models if file is not None else ()
        check_services(self._config, [*self._config.backend, *(one for model in models for one in model.backends)])
        if self._catalogue is not None and file is not None:
            self._catalogue.use(file)
        self._table.begin(file)
        if self._catalogue is not None:
            self._spawn(self._catalogue.run())
        results = await asyncio.gather(
            *(route.wait_ready(until) for route in self._table.routes), return_exceptions=True
        )
        errors = [error for error in results if error is not None]
        late = [error for error in errors if isinstance(error, StartupError)]
        if errors != late or len(late) == len(results):
            raise next(error for error in errors if error not in late) if errors != late else late[0]
        for error in late:
            _log.error("a model is not ready: the others are served", cause=error.message)
        self._spawn(self._follow_health())
        if self._watch is not None:
            self._spawn(self._watch.run())

    async def drain(self) -> None:
        """Refuse new streams; return when the live ones have ended. When cancelled, make them end themselves now."""
        routes = self._table.routes
        for route in routes:
            route.drain()
        try:
            await asyncio.gather(*(route.wait_until_empty() for route in routes))
        finally:
            # The grace is over; or the only calls left have readers that were cut off and do not read their status.
            for route in routes:
                route.end_grace()

    async def close(self) -> None:
        """Disconnect."""
        if self._keys is not None:
            # While its task still writes.
            await self._keys.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._roll.close()
        await self._table.close()

    def status_lines(self) -> list[str]:
        """Lines about models, backends and the tokenizers."""
        return [line for route in self._table.routes for line in route.status_lines()]

    def _are_tokenizers_up(self) -> float:
        routes = self._table.routes
        return float(bool(routes) and all(route.link.is_ready for route in routes))

    async def _follow_health(self) -> None:
        """Show SERVING while a request could be answered."""
        shown: bool | None = None
        while True:
            serving = self._table.is_ready
            if serving is not shown and self._set_serving is not None:
                await self._set_serving(serving)
                shown = serving
            await self._health_changed.wait()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._on_done)
        self._tasks.append(task)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
