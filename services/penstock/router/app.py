"""Router process: it connects to the tokenizer and backends, then serves TextService and forwards admin calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping

import grpc
from prometheus_client import CollectorRegistry

from penstock.common.credentials import Tokens, check_channel_files
from penstock.common.errors import StartupError
from penstock.compat.kserve.inference_service import KSERVE_SERVICE, KserveServicer
from penstock.inference import kserve_pb2_grpc
from penstock.router.aio import Wakeup
from penstock.router.backends.attempts import Attempts
from penstock.router.backends.backend import Backend
from penstock.router.backends.discovery import resolve
from penstock.router.backends.forecast import Forecast
from penstock.router.backends.link import BackendState
from penstock.router.backends.policy import Policy, PolicyConfig
from penstock.router.backends.pool import BackendPool, Resolver
from penstock.router.backends.unary_attempts import UnaryAttempts
from penstock.router.config import RouterConfig
from penstock.router.frontend.admission import Admission
from penstock.router.frontend.drain import Drain
from penstock.router.frontend.forwarding import (
    ADMIN_SERVICE,
    MODEL_SERVICE,
    Forwarding,
    ForwardingAdminServicer,
    ForwardingModelServicer,
    token_files,
)
from penstock.router.frontend.generate import TextFlow
from penstock.router.frontend.parts import Parts
from penstock.router.frontend.score_embed import ScoreEmbedFlow
from penstock.router.frontend.score_embed_text import ScoreEmbedTexts
from penstock.router.frontend.servicer import TextServicer
from penstock.router.frontend.tokens import TokenFlow
from penstock.router.frontend.turn_limiter import TurnLimiter
from penstock.router.metrics import RouterMetrics
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.router.tokenizer.pipeline import Pipeline
from penstock.router.tokenizer.remembered_texts import TokenTexts
from penstock.router.tokenizer.tokenizer_link import TokenizerLink
from penstock.v1 import admin_pb2_grpc, model_pb2_grpc, text_pb2_grpc

SERVICE_NAME = "penstock.v1.TextService"


class RouterApp:
    """The router as a service. Implements serving.server.Service and ControlsHealth."""

    name = "router"
    grpc_services = (SERVICE_NAME, KSERVE_SERVICE, ADMIN_SERVICE, MODEL_SERVICE)

    def __init__(self, config: RouterConfig, registry: CollectorRegistry, *, resolver: Resolver = resolve) -> None:
        """Make it inside the event loop that will serve it. `resolver` stands in for DNS in tests."""
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []
        self._set_serving: Callable[[bool], Awaitable[None]] | None = None
        self._health_changed = Wakeup()
        metrics = RouterMetrics(registry)
        detokenizer = Detokenizer(max_outstanding=config.max_outstanding_messages)
        self._link = TokenizerLink(config, detokenizer, metrics, on_change=self._health_changed.set)
        self._pool = BackendPool(
            config,
            detokenizer,
            metrics,
            tokenizer_fingerprint=lambda: self._link.fingerprint,
            on_change=self._health_changed.set,
            on_failure=self._fail,
            resolver=resolver,
        )
        self._admission = Admission(
            max_live=config.max_live_requests,
            max_waiting=config.max_waiting_requests,
            retry_after_seconds=config.retry_after_seconds,
            tenant_share=config.tenant_share,
            idle_share=config.idle_share,
        )
        policy: Policy[Backend] = Policy(
            PolicyConfig(slack=config.affinity_slack, factor=config.affinity_factor, max_sessions=config.max_sessions)
        )
        attempts = self._attempts = Attempts(self._pool, policy, config, metrics)
        forecast = Forecast(self._pool, config)
        token_texts = TokenTexts(self._link, config.max_token_texts)
        self._drain = Drain()
        self._score_embed = ScoreEmbedFlow(
            config,
            ScoreEmbedTexts(self._link, config),
            self._pool,
            UnaryAttempts(self._pool, attempts, config, metrics),
            forecast,
            self._admission,
            self._drain,
            token_texts,
            metrics,
        )
        pipeline = Pipeline(self._link, config)
        self._tokens = TokenFlow(config, pipeline, self._link, self._pool, metrics)
        self._parts = Parts(
            config=config,
            link=self._link,
            pipeline=pipeline,
            pool=self._pool,
            attempts=attempts,
            forecast=forecast,
            admission=self._admission,
            drain=self._drain,
            detokenizer=detokenizer,
            token_texts=token_texts,
            metrics=metrics,
            turn_limiter=TurnLimiter(config.writes_per_turn),
        )
        metrics.live.set_function(lambda: self._admission.live)
        metrics.waiting.set_function(lambda: self._admission.waiting)

    def bind_health(self, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        """See serving.server.ControlsHealth."""
        self._set_serving = set_serving

    def register(self, server: grpc.aio.Server) -> None:
        """Add TextService, KServe's service, and the services that are forwarded to backends."""
        flow = TextFlow(self._parts)
        servicer = TextServicer(flow, self._score_embed, self._tokens, self._pool, self._link)
        text_pb2_grpc.add_TextServiceServicer_to_server(servicer, server)
        kserve = KserveServicer(flow, self._pool, self._link, self._config.kserve_stream_requests)
        kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(kserve, server)
        forwarding = Forwarding(self._config, self._pool)
        admin_pb2_grpc.add_GenerationAdminServiceServicer_to_server(ForwardingAdminServicer(forwarding), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ForwardingModelServicer(forwarding), server)

    def token_files(self) -> Mapping[str, Tokens]:
        """See serving.server.HasTokens."""
        return token_files(self._config)

    async def start(self) -> None:
        """Return once tokenizer and a backend are ready. Raises StartupError for a file, --tokenizer or --backend."""
        # Checked only at the start: later a file may be missing while it is replaced, and connecting is tried again.
        check_channel_files(self._config)
        until = time.monotonic() + self._config.start_timeout_seconds
        self._spawn(self._link.run())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(_loop_time(until)):
                await self._link.wait_ready()
        if not self._link.is_ready:
            raise StartupError(
                f"no tokenizer at {', '.join(self._config.tokenizer)} within "
                f"{self._config.start_timeout_seconds:g} s ({self._link.last_problem})",
                flag="--tokenizer",
            )
        self._pool.start()
        while not self._pool.ready():
            if self._pool.only_mismatches():
                raise StartupError(
                    f"tokenizer and model do not belong together: {self._states()}; the tokenizer is "
                    f"{', '.join(self._config.tokenizer)}",
                    flag="--backend",
                )
            left = until - time.monotonic()
            if left <= 0 or not await self._pool.changed(left):
                raise StartupError(
                    f"no generation backend is ready within {self._config.start_timeout_seconds:g} s: {self._states()}",
                    flag="--backend",
                )
        self._spawn(self._follow_health())

    async def drain(self) -> None:
        """Refuse new streams; return when the live ones have ended. When cancelled, make them end themselves now."""
        self._admission.drain()
        try:
            await self._admission.wait_until_empty()
        finally:
            # The grace is over; or the only calls left have readers that were cut off and do not read their status.
            self._drain.end_grace()

    async def close(self) -> None:
        """Disconnect."""
        await self._attempts.adapters.close()
        await self._pool.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def status_lines(self) -> list[str]:
        """Lines about models, backends and the tokenizer."""
        lines = [f"tokenizer {', '.join(self._config.tokenizer)} ({self._link.fingerprint[:12]})"]
        for name, info in self._pool.models.items():
            ready = self._pool.ready(name)
            count, out = len(ready), sum(self._pool.outliers.is_ejected(backend.key) for backend in ready)
            context = info.limits.max_context_tokens
            ejected = f" ({out} ejected)" if out else ""
            lines.append(f"model {name}: {count} backend{'s' if count != 1 else ''}{ejected}, context {context} tokens")
        return lines

    def _states(self) -> str:
        known = [f"{backend.key} ({_STATES[backend.link.state]})" for backend in self._pool.backends]
        return ", ".join(known) or f"{', '.join(self._config.backend)} (name not resolved)"

    async def _follow_health(self) -> None:
        """Show SERVING while a request could be answered."""
        shown: bool | None = None
        while True:
            serving = self._link.is_ready and bool(self._pool.ready())
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


_STATES = {
    BackendState.CONNECTING: "not reached or not ready",
    BackendState.READY: "ready",
    BackendState.DRAINING: "draining",
    BackendState.MISMATCH: "other tokenizer",
}


def _loop_time(until: float) -> float:
    return asyncio.get_running_loop().time() + until - time.monotonic()
