"""Way of one model's requests through the router: its tokenizer, its backends, its admission, and the flows on them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.common.errors import StartupError
from penstock.router.backends.attempts import Attempts
from penstock.router.backends.backend import Backend
from penstock.router.backends.discovery import Resolver, resolve
from penstock.router.backends.forecast import Forecast
from penstock.router.backends.link import BackendState
from penstock.router.backends.policy import Policy, PolicyConfig
from penstock.router.backends.pool import BackendPool
from penstock.router.backends.unary_attempts import UnaryAttempts
from penstock.router.config import RouterConfig
from penstock.router.frontend.admission import Admission
from penstock.router.frontend.catalogue import Catalogue
from penstock.router.frontend.drain import Drain
from penstock.router.frontend.generate import TextFlow
from penstock.router.frontend.parts import Parts
from penstock.router.frontend.residence import Residence, ResidenceState
from penstock.router.frontend.score_embed import ScoreEmbedFlow
from penstock.router.frontend.score_embed_text import ScoreEmbedTexts
from penstock.router.frontend.tokens import TokenFlow
from penstock.router.frontend.turn_limiter import TurnLimiter
from penstock.router.keys.key_desk import KeyDesk
from penstock.router.metrics import RouterMetrics
from penstock.router.models_file import ModelEntry
from penstock.router.requests.delta_pace import DeltaPace
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.router.tokenizer.pipeline import Pipeline
from penstock.router.tokenizer.remembered_texts import TokenTexts
from penstock.router.tokenizer.tokenizer_link import TokenizerLink
from penstock.v1 import tokenizer_pb2


@dataclass(frozen=True, slots=True)
class RouteShare:
    """Parts of the process that all routes share."""

    config: RouterConfig
    metrics: RouterMetrics
    turn_limiter: TurnLimiter
    delta_pace: DeltaPace
    # Some route became ready or is not any more.
    on_change: Callable[[], None]
    # A bug ended a task that must not end.
    on_failure: Callable[[BaseException], None]
    resolver: Resolver = resolve
    # Of the models on demand; None without a file of models.
    catalogue: Catalogue | None = None
    # None without a file of keys.
    keys: KeyDesk | None = None


class RoutedModel:
    """One route. Prefix tables, sessions, ejections, places and shares of tenants are its own.

    Without a file of models there is one, without an entry: its backends may serve several models of one tokenizer.
    Belongs to one event loop.
    """

    def __init__(self, share: RouteShare, entry: ModelEntry | None = None) -> None:
        """Make it; `start` connects."""
        config = share.config
        if entry is not None:
            config = dataclasses.replace(config, tokenizer=entry.tokenizer, backend=entry.backends)
        metrics = share.metrics
        self.entry = entry
        self._config = config
        self._on_failure = share.on_failure
        self._tasks: list[asyncio.Task[None]] = []
        detokenizer = Detokenizer(max_outstanding=config.max_outstanding_messages)
        self.link = TokenizerLink(config, detokenizer, metrics, on_change=share.on_change)
        self.pool = BackendPool(
            config,
            detokenizer,
            metrics,
            tokenizer=lambda: self.link.info or tokenizer_pb2.GetTokenizerResponse(),
            on_change=share.on_change,
            on_failure=share.on_failure,
            on_kept=lambda backend, names: policy.note_kept(backend, names, is_plain=not backend.is_own),
            resolver=share.resolver,
        )
        self.admission = Admission(
            max_live=config.max_live_requests,
            max_waiting=config.max_waiting_requests,
            retry_after_seconds=config.retry_after_seconds,
            tenant_share=config.tenant_share,
            idle_share=config.idle_share,
        )
        # Of a model on demand: its way into a slot.
        self.residence: Residence | None = None
        if entry is not None and entry.is_on_demand and share.catalogue is not None:
            self.residence = share.catalogue.add(entry, self.pool, self.admission)
        self._catalogue = share.catalogue
        policy: Policy[Backend] = Policy(
            PolicyConfig(
                slack=config.affinity_slack,
                factor=config.affinity_factor,
                max_sessions=config.max_sessions,
                most_looked_at=config.max_compared_backends,
                max_prefixes=config.max_known_blocks,
            )
        )
        attempts = self._attempts = Attempts(self.pool, policy, config, metrics)
        forecast = Forecast(self.pool, config)
        token_texts = TokenTexts(self.link, config.max_token_texts)
        pipeline = Pipeline(self.link, config)
        self._drain = Drain()
        self.score_embed = ScoreEmbedFlow(
            config,
            ScoreEmbedTexts(self.link, config),
            self.pool,
            UnaryAttempts(self.pool, attempts, config, metrics),
            forecast,
            self.admission,
            self._drain,
            token_texts,
            metrics,
            share.keys,
        )
        self.tokens = TokenFlow(config, pipeline, self.link, self.pool, metrics)
        self.flow = TextFlow(
            Parts(
                config=config,
                link=self.link,
                pipeline=pipeline,
                pool=self.pool,
                attempts=attempts,
                forecast=forecast,
                admission=self.admission,
                drain=self._drain,
                detokenizer=detokenizer,
                token_texts=token_texts,
                metrics=metrics,
                turn_limiter=share.turn_limiter,
                delta_pace=share.delta_pace,
                keys=share.keys,
            )
        )

    @property
    def name(self) -> str:
        """Name of the entry; empty without one."""
        return self.entry.name if self.entry is not None else ""

    @property
    def is_ready(self) -> bool:
        """True while a request could be answered, be it after the model's load."""
        return self.link.is_ready and (self.residence is not None or bool(self.pool.ready()))

    @property
    def takes_requests(self) -> bool:
        """True while a request may be sent this way."""
        return self.is_ready

    @property
    def is_cold(self) -> bool:
        """True while requests must wait for the model to be loaded."""
        return self.residence is not None and self.residence.state is not ResidenceState.LOADED

    def takes_requests_of(self, model: str, adapter: str) -> bool:
        """True while a request for one of its models, or an adapter of that, may be sent this way."""
        return self.link.is_ready and (self.is_cold or bool(self.pool.ready(model, adapter)))

    def start(self) -> None:
        """Begin to connect: to the tokenizer, then to backends, which must belong to it."""
        self._spawn(self.link.run())
        self._spawn(self._connect_backends())

    async def wait_ready(self, until: float) -> None:
        """Return once tokenizer and a backend are ready. `until`: a time of time.monotonic().

        Raises StartupError for --tokenizer or --backend, or for the file of models.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - time.monotonic()):
                await self.link.wait_ready()
        if not self.link.is_ready:
            raise self._not_started(
                f"no tokenizer at {', '.join(self._config.tokenizer)} within "
                f"{self._config.start_timeout_seconds:g} s ({self.link.last_problem})",
                "--tokenizer",
            )
        while self.residence is None and not self.pool.ready():
            if self.pool.only_mismatches():
                raise self._not_started(
                    f"tokenizer and model do not belong together: {self._states()}; the tokenizer is "
                    f"{', '.join(self._config.tokenizer)}",
                    "--backend",
                )
            left = until - time.monotonic()
            if left <= 0 or not await self.pool.changed(left):
                raise self._not_started(
                    f"no generation backend is ready within {self._config.start_timeout_seconds:g} s: {self._states()}",
                    "--backend",
                )

    def can_become(self, entry: ModelEntry) -> bool:
        """True when another entry needs no other tokenizer: live streams hold the ids of this one's."""
        old = self.entry
        return old is not None and (old.tokenizer, old.is_on_demand) == (entry.tokenizer, entry.is_on_demand)

    def become(self, entry: ModelEntry) -> None:
        """Take another entry of the same tokenizer. Backends that left finish their streams."""
        self.entry = entry
        if self.residence is not None:
            # From its next load on.
            self.residence.entry = entry
        else:
            self.pool.follow(entry.backends)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        if self.residence is not None:
            self.residence.drain()
        self.admission.drain()

    async def wait_until_empty(self) -> None:
        """Return when no request is left."""
        await self.admission.wait_until_empty()

    def end_grace(self) -> None:
        """Make the requests that are left end themselves now."""
        self._drain.end_grace()

    async def leave_slot(self) -> None:
        """Unload a model on demand that has no requests any more."""
        if self.residence is not None and self._catalogue is not None:
            await self._catalogue.remove(self.residence)

    async def close(self) -> None:
        """Disconnect. What a slot has stays there: the next router takes it over."""
        if self.residence is not None:
            self.residence.drain()
        await self._attempts.adapters.close()
        await self.pool.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def status_lines(self) -> list[str]:
        """Lines about the tokenizer, the models and their backends."""
        lines = [f"tokenizer {', '.join(self._config.tokenizer)} ({self.link.fingerprint[:12]})"]
        if self.is_cold:
            lines.append(f"model {self.name}: loaded when a request asks for it")
        for name, info in self.pool.models.items():
            ready = self.pool.ready(name)
            count, out = len(ready), sum(self.pool.outliers.is_ejected(backend.key) for backend in ready)
            context = info.limits.max_context_tokens
            ejected = f" ({out} ejected)" if out else ""
            lines.append(f"model {name}: {count} backend{'s' if count != 1 else ''}{ejected}, context {context} tokens")
        return lines

    async def _connect_backends(self) -> None:
        await self.link.wait_ready()
        self.pool.start()

    def _states(self) -> str:
        known = [f"{backend.key} ({_STATES[backend.link.state]})" for backend in self.pool.backends]
        return ", ".join(known) or f"{', '.join(self._config.backend)} (name not resolved)"

    def _not_started(self, why: str, flag: str) -> StartupError:
        return StartupError(f"{self.name}: {why}", flag="--models") if self.name else StartupError(why, flag=flag)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._on_done)
        self._tasks.append(task)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)


_STATES = {
    BackendState.CONNECTING: "not reached or not ready",
    BackendState.READY: "ready",
    BackendState.DRAINING: "draining",
    BackendState.MISMATCH: "other tokenizer",
}
