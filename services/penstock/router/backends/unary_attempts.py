"""Attempts of a call with a single answer (Score, Embed): it changes nothing, so it may be tried elsewhere."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from penstock.common.errors import NotFound, Unavailable
from penstock.common.logging import get_logger
from penstock.common.request_context import current_request_id
from penstock.common.tracing import SpanKind, stage
from penstock.router.backends.ability import Ability
from penstock.router.backends.attempts import Attempts
from penstock.router.backends.backend import Backend
from penstock.router.backends.outliers import Probe
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig
from penstock.router.engines.backend_connection import BackendCalls
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.probation import CallProbation
from penstock.router.requests.suspect import Suspect

AnswerT = TypeVar("AnswerT")
# (stub, seconds left) -> the call.
Call = Callable[[BackendCalls, float | None], Awaitable[AnswerT]]
_log = get_logger("penstock.router")


class UnaryAttempts:
    """Runs calls for the handlers. Belongs to one event loop."""

    def __init__(
        self,
        pool: BackendPool,
        attempts: Attempts,
        config: RouterConfig,
        metrics: RouterMetrics,
    ) -> None:
        self._pool = pool
        self._attempts = attempts
        self._config = config
        self._metrics = metrics

    def check_capacity(self, model: str, adapter: str = "") -> None:
        """Check that a call that came now could be placed. Raises as `run`."""
        self._attempts.check_capacity(model, adapter)

    async def require_adapter(self, model: str, adapter: str, left: float | None) -> None:
        """Return once a backend has the adapter. Raises as AdapterLoading.require."""
        await self._attempts.returns.end(model, adapter, left)
        await self._attempts.adapters.require(model, adapter, left)

    async def run(
        self,
        call: Call[AnswerT],
        *,
        model: str,
        hashes: Sequence[int],
        deadline: float | None,
        adapter: str = "",
        method: str = "",
        is_idle_only: bool = False,
    ) -> AnswerT:
        """Return the first answer. `deadline` is a time of time.monotonic(). `method` is the call's name (`Score`),
        which not every backend has; empty: all have it. `is_idle_only`: it uses idle capacity only.

        Raises the backend's error when it is about the request itself; Unavailable when no backend could answer,
        Internal POISON when the backends that ran it crashed.
        """
        where = (model, adapter)
        self._attempts.note_request()
        left = None if deadline is None else deadline - time.monotonic()
        await self._attempts.returns.end(model, adapter, left)
        if adapter:
            # It may have been unloaded while the texts became ids.
            left = None if deadline is None else deadline - time.monotonic()
            await self._attempts.adapters.require(model, adapter, left)
        ability = Ability.to_answer(method) if method else None
        lost_on: set[str] = set()
        suspect = Suspect(time.monotonic())
        attempt = 0
        while True:
            backend, probe, probation = await self._choose(
                where, hashes, lost_on, suspect, ability, first=attempt == 0, is_idle_only=is_idle_only
            )
            try:
                with stage(f"attempt {attempt + 1}", SpanKind.CLIENT, {"server.address": backend.key}):
                    answer = await backend.call(call, hashes, deadline, suspect, probe, is_idle_only=is_idle_only)
            except BaseException as error:
                if probation is not None:
                    probation.end(has_passed=False)
                if isinstance(error, NotFound) and error.reason == "ADAPTER_NOT_FOUND" and adapter:
                    # It was unloaded there a moment ago. Others may have it.
                    backend.adapters.note_missing(adapter)
                    if self._attempts.adapters.is_hopeless(model, adapter):
                        raise
                elif not isinstance(error, Unavailable):
                    raise
                lost_on.add(backend.key)
                await self._check_again(error, attempt, suspect)
            else:
                if probation is not None:
                    probation.end(has_passed=True)
                return answer
            self._metrics.retries.inc()
            attempt += 1
            _log.info("request moved", request_id=current_request_id.get(), begun=False, attempt=attempt + 1)

    async def _check_again(self, error: Unavailable | NotFound, attempt: int, suspect: Suspect) -> None:
        await self._attempts.check_blame(suspect)
        # What another's crashes or probation cost it is not held against it.
        if attempt + 1 >= self._config.max_attempts + suspect.excused or not self._attempts.may_retry():
            raise error

    async def _choose(
        self,
        where: tuple[str, str],
        hashes: Sequence[int],
        lost_on: set[str],
        suspect: Suspect,
        ability: Ability | None,
        *,
        first: bool,
        is_idle_only: bool,
    ) -> tuple[Backend, Probe | None, CallProbation | None]:
        model, adapter = where
        if not first:
            moved, probation = await self._attempts.wait_for_place(
                suspect, where, hashes, lost_on, ability, is_idle_only=is_idle_only
            )
            if moved is None:
                raise self._attempts.nowhere(*where, ability)
            return moved, None, probation
        probed = self._pool.to_probe(*where)
        if probed is not None and (ability is None or ability.has(probed)):
            return probed, self._pool.outliers.begin_probe(probed.key), None
        backend = self._attempts.choose(
            model, hashes, lost_on, adapter=adapter, ability=ability, is_idle_only=is_idle_only
        )
        if backend is None:
            raise self._attempts.nowhere(*where, ability)
        return backend, None, None
