"""Set of the generation backends: it follows the addresses that configured names resolve to, and tells ready ones."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from penstock.common.errors import InvalidArgument, NotFound
from penstock.common.logging import get_logger
from penstock.router.backends.backend import Backend, BackendAddress, BackendState
from penstock.router.backends.discovery import resolve
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.request_state import RequestState
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.v1 import model_pb2

Resolver = Callable[[Iterable[str]], Awaitable[dict[str, set[BackendAddress]]]]
# Number of deaths remembered, to tell a poisonous request from bad luck: far more than a request can survive.
_MAX_DEATHS = 1024
_log = get_logger("penstock.router")


class BackendPool:
    """Backends by address. Belongs to one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        detokenizer: Detokenizer,
        metrics: RouterMetrics,
        *,
        tokenizer_fingerprint: Callable[[], str],
        on_change: Callable[[], None],
        on_failure: Callable[[BaseException], None],
        resolver: Resolver = resolve,
    ) -> None:
        """Make it. `on_change`: some backend's state changed. `on_failure`: a bug ended a task that must not end."""
        self._config = config
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._notify = on_change
        self._on_failure = on_failure
        self._resolver = resolver
        self._backends: dict[BackendAddress, Backend] = {}
        self._tasks: dict[BackendAddress, asyncio.Task[None]] = {}
        # Backends that no name resolves to any more: they finish their streams (a rolling restart) and get nothing new.
        self._leaving: set[BackendAddress] = set()
        self._follower: asyncio.Task[None] | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._deaths: deque[tuple[float, int]] = deque(maxlen=_MAX_DEATHS)
        self._death_numbers = itertools.count(1)
        self._models: dict[str, model_pb2.GetModelInfoResponse] = {}

    def start(self) -> None:
        """Begin to resolve and connect."""
        self._follower = self._spawn(self._follow_names())

    async def close(self) -> None:
        """Disconnect from everything."""
        tasks = [*self._tasks.values(), *([self._follower] if self._follower else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    @property
    def backends(self) -> list[Backend]:
        """All known backends."""
        return list(self._backends.values())

    @property
    def models(self) -> dict[str, model_pb2.GetModelInfoResponse]:
        """Models served now or before, by name."""
        return self._models

    def ready(self, model: str = "") -> list[Backend]:
        """Backends that take requests, of one model when named."""
        return [
            backend
            for where, backend in self._backends.items()
            if backend.state is BackendState.READY
            and where not in self._leaving
            and (not model or (backend.info and backend.info.model == model))
        ]

    def only_mismatches(self) -> bool:
        """True when every known backend was turned away for its tokenizer fingerprint."""
        states = {backend.state for backend in self._backends.values()}
        return states == {BackendState.MISMATCH}

    def choose_model(self, asked: str) -> str:
        """Choose the model's name; empty while none is known. Raises NotFound; InvalidArgument when it must be set."""
        if asked and self._models and asked not in self._models:
            raise NotFound("model: no backend serves a model of this name", reason="MODEL_NOT_FOUND", field="model")
        served = [asked] if asked else [name for name in self._models if self.ready(name)] or list(self._models)
        if len(served) > 1:
            raise InvalidArgument("model", "must be set: several models are served (ListModels names them)")
        return next(iter(served), "")

    async def changed(self, timeout: float) -> bool:
        """Wait until any backend changes state; False after `timeout` seconds."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True

    def is_poison(self, state: RequestState) -> bool:
        """True when every backend that died since the request came ran it, and two or more died."""
        since = state.timings.received_at
        recent = {number for at, number in self._deaths if at >= since}
        return len(state.deaths) >= 2 and recent <= state.deaths

    async def _follow_names(self) -> None:
        while True:
            found = await self._resolver(self._config.backend)
            self._apply(found)
            await asyncio.sleep(self._config.resolve_interval_seconds)

    def _apply(self, found: dict[str, set[BackendAddress]]) -> None:
        for target, addresses in found.items():
            known = {where for where in self._backends if where.target == target}
            for where in sorted(addresses - known, key=lambda one: one.address):
                self._add(where)
            self._leaving -= addresses
            for where in known - addresses:
                self._leaving.add(where)
                if self._backends[where].in_flight == 0:
                    self._remove(where)

    def _add(self, where: BackendAddress) -> None:
        backend = Backend(
            where,
            self._config,
            self._detokenizer,
            self._metrics,
            tokenizer_fingerprint=self._tokenizer_fingerprint,
            on_change=self._on_change,
            on_death=self._on_death,
        )
        self._backends[where] = backend
        self._tasks[where] = self._spawn(backend.run())
        _log.info("backend found", backend=where.address, target=where.target)

    def _remove(self, where: BackendAddress) -> None:
        self._tasks.pop(where).cancel()
        del self._backends[where]
        self._leaving.discard(where)
        _log.info("backend gone from its name", backend=where.address, target=where.target)
        self._on_change()

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self._on_failure(error)

    def _on_death(self) -> int:
        number = next(self._death_numbers)
        self._deaths.append((time.monotonic(), number))
        return number

    def _on_change(self) -> None:
        for backend in self.ready():
            if backend.info is not None:
                self._models[backend.info.model] = backend.info
        for target in self._config.backend:
            ready = sum(1 for backend in self.ready() if backend.where.target == target)
            self._metrics.backends_up.labels(target).set(ready)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._notify()
