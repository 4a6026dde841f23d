"""Loading of adapters at backends because requests ask for them, where the operator allows it (--adapter-loading)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

import grpc

from penstock.common.errors import DeadlineExceeded, NotFound, PenstockError, ResourceExhausted, Unavailable
from penstock.common.logging import get_logger
from penstock.router.backends.load_view import LoadView
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics

_log = get_logger("penstock.router")


class Loader(Protocol):
    """A backend, as far as its turn to load an adapter depends on it."""

    @property
    def key(self) -> str:
        """Key that is unique among backends."""

    @property
    def load(self) -> LoadView:
        """Load of it."""


LoaderT = TypeVar("LoaderT", bound=Loader)


def idlest_first(backends: Iterable[LoaderT], loading: Mapping[str, int]) -> list[LoaderT]:
    """Return backends in the order in which they are asked to load an adapter.

    `loading` is the number of loads that are under way at each, by key. One counts as a request: of an idle cluster the
    first backend would get the adapters of all requests that come while it loads.
    """
    return sorted(backends, key=lambda one: one.load.requests + loading.get(one.key, 0))


class AdapterLoading:
    """Finds out whether a request's adapter is there, and else has a backend load it. Belongs to one event loop."""

    def __init__(self, pool: BackendPool, config: RouterConfig, metrics: RouterMetrics) -> None:
        self._pool = pool
        self._config = config
        self._metrics = metrics
        # Model and adapter -> the load that is under way, which all requests for it wait for.
        self._loads: dict[tuple[str, str], asyncio.Task[PenstockError | None]] = {}
        # Key of a backend -> loads of ours that are under way there.
        self._loading: Counter[str] = Counter()

    async def close(self) -> None:
        """End the loads that are under way."""
        tasks = list(self._loads.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check(self, model: str, adapter: str) -> None:
        """Check that a ready backend has the adapter, or could be asked to load it. Raises NotFound, Unavailable."""
        if not self._pool.ready(model, adapter) and not (self._config.adapter_loading and self._pool.ready(model)):
            raise self.missing(model, adapter)

    def is_hopeless(self, model: str, adapter: str) -> bool:
        """True when no backend has the adapter, whatever its state, and none may be asked to load it."""
        return not self._config.adapter_loading and not self._pool.has_adapter(model, adapter)

    def missing(self, model: str, adapter: str) -> PenstockError:
        """Make the error for an adapter that no ready backend has."""
        if self._pool.ready(model) and not self._pool.has_adapter(model, adapter):
            return _not_found()
        return Unavailable(
            "no generation backend that has the adapter is ready",
            reason="NO_BACKEND",
            retry_after_seconds=self._config.retry_after_seconds,
        )

    async def require(self, model: str, adapter: str, left: float | None) -> None:
        """Return once a ready backend has the adapter. `left`: seconds to the deadline; None: there is none.

        Raises NotFound when no backend has it and none could load it, ResourceExhausted when there is no room for it or
        too many are being loaded, Unavailable when no answer came in time, DeadlineExceeded.
        """
        error = await self.bring(model, adapter, left)
        if error is not None:
            raise error

    async def bring(self, model: str, adapter: str, left: float | None) -> PenstockError | None:
        """Do what `require` does, and return the error."""
        if self._pool.ready(model, adapter):
            return None
        if not (self._config.adapter_loading and self._pool.ready(model)):
            return self.missing(model, adapter)
        load = self._loads.get((model, adapter))
        if load is None:
            if len(self._loads) >= self._config.max_adapter_loads:
                return self._too_many()
            load = self._loads[model, adapter] = asyncio.ensure_future(self._load(model, adapter))
            load.add_done_callback(lambda _: self._loads.pop((model, adapter), None))
        # Others may wait for it, too: a request that leaves does not end it.
        done, _ = await asyncio.wait({load}, timeout=None if left is None else max(left, 0.0))
        if not done:
            return DeadlineExceeded("the deadline passed while the adapter was loaded", reason="DEADLINE_EXCEEDED")
        return self._not_loaded() if load.cancelled() else load.result()

    async def _load(self, model: str, adapter: str) -> PenstockError | None:
        """Ask one backend after the other, the idlest first. Return an error as clients may see it."""
        until = time.monotonic() + self._config.adapter_load_seconds
        path = self._pool.adapter_path(model, adapter)
        failure: PenstockError | None = None
        for backend in idlest_first(self._pool.usable(model), self._loading)[: self._config.max_attempts]:
            self._loading[backend.key] += 1
            try:
                await backend.adapters.load(adapter, path, max(until - time.monotonic(), 0.001))
            except PenstockError as error:
                _log.warning("backend did not load an adapter", backend=backend.key, reason=error.reason)
                self._metrics.adapter_loads("failed").inc()
                # One that may have it later tells more than one that has no such folder.
                failure = failure if failure is not None and failure.code in _LATER else error
            else:
                _log.info("backend loaded an adapter", backend=backend.key)
                self._metrics.adapter_loads("ok").inc()
                return None
            finally:
                self._loading[backend.key] -= 1
                if not self._loading[backend.key]:
                    del self._loading[backend.key]
        return self._public(failure, model, adapter)

    def _public(self, failure: PenstockError | None, model: str, adapter: str) -> PenstockError:
        """Return a backend's refusal as clients see it: its paths and flags are for operators."""
        if failure is not None and failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ResourceExhausted(
                "the backends have no room for another adapter now",
                reason=failure.reason,
                retry_after_seconds=self._config.retry_after_seconds,
            )
        if failure is None or failure.code in _WAITING:
            # Somebody else may have loaded it meanwhile.
            return self._not_loaded() if self._pool.ready(model) else self.missing(model, adapter)
        return _not_found()

    def _not_loaded(self) -> PenstockError:
        return Unavailable(
            "no generation backend has loaded the adapter in time",
            reason="ADAPTER_LOADING",
            retry_after_seconds=self._config.retry_after_seconds,
        )

    def _too_many(self) -> PenstockError:
        return ResourceExhausted(
            "too many other adapters are being loaded for requests",
            reason="ADAPTER_LOADS_FULL",
            retry_after_seconds=self._config.retry_after_seconds,
        )


# Statuses of a load that another one may not get: without an answer, and with those for want of room.
_WAITING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_LATER = (*_WAITING, grpc.StatusCode.RESOURCE_EXHAUSTED)


def _not_found() -> NotFound:
    return NotFound("adapter: no backend has an adapter of this name", reason="ADAPTER_NOT_FOUND", field="adapter")
