"""Attempts of a request: the first, replays before the first token, moves after it (promise 3 of the README)."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from penstock.common.errors import (
    Aborted,
    FailedPrecondition,
    Internal,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock.common.logging import get_logger
from penstock.common.request_context import current_request_id
from penstock.router.backends.backend import Backend
from penstock.router.backends.policy import Policy
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.request_state import Loss, RequestState
from penstock.v1 import common_pb2, generation_pb2

_log = get_logger("penstock.router")


class RetryBudget:
    """Budget that keeps retries a small share of requests, so that retries do not add to an overload.

    It is a bucket that starts full with `burst` retries; each request adds `ratio` of one.
    """

    def __init__(self, ratio: float, burst: int) -> None:
        self._ratio = ratio
        self._burst = float(burst)
        self._left = float(burst)

    def note_request(self) -> None:
        """Count a request that was placed for the first time."""
        self._left = min(self._burst, self._left + self._ratio)

    def take(self) -> bool:
        """Spend one more retry; False when the budget has none."""
        # The sum of ten times 0.1 is a little less than 1.
        if self._left < 1.0 - 1e-9:
            return False
        self._left -= 1.0
        return True


class Attempts:
    """Starts attempts; called by the handlers of the streams. Belongs to one event loop."""

    def __init__(
        self, pool: BackendPool, policy: Policy[Backend], config: RouterConfig, metrics: RouterMetrics
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._config = config
        self._metrics = metrics
        self._budget = RetryBudget(config.retry_budget_ratio, config.retry_budget_burst)
        # Two routers in front of one backend must not choose the same id for different requests.
        self._suffix = secrets.token_hex(3)
        # Model -> number of requests that wait for their prompt's ids.
        self._preparing: Counter[str] = Counter()

    def prepare(self, model: str) -> Callable[[], None]:
        """Set room aside before a prompt is computed; call the result once the request is placed or given up.

        Raises as `place`: in a flood a refusal must not wait for the prompts of all that came before it.
        """
        self.check_capacity(model)
        self._preparing[model] += 1
        return partial(self._prepared, model)

    def check_capacity(self, model: str) -> None:
        """Check that a request that came now could be placed. Raises as `place`."""
        if sum(max(0, backend.room) for backend in self._pool.ready(model)) <= self._preparing[model]:
            raise self.nowhere(model)

    def _prepared(self, model: str) -> None:
        self._preparing[model] -= 1
        if not self._preparing[model]:
            del self._preparing[model]

    def note_request(self) -> None:
        """Count a request that was placed: it adds to the retry budget."""
        self._budget.note_request()

    def may_retry(self) -> bool:
        """Spend one more retry; False when the budget has none."""
        return self._budget.take()

    def place(self, state: RequestState) -> None:
        """Start the first attempt.

        Raises Unavailable, ResourceExhausted or FailedPrecondition when no backend can take it.
        """
        self.note_request()
        backend = self._choose(state)
        if backend is None:
            raise self.nowhere(state.spec.model)
        self._submit(state, backend)

    async def recover(self, state: RequestState) -> None:
        """Try elsewhere after a loss.

        Raises Internal (POISON), Unavailable before the first token and Aborted after it when that is not possible.
        """
        loss, state.loss = state.loss, None
        if loss is None:
            return
        begun = state.has_tokens
        self._check_limits(state, loss, begun)
        backend = await self._wait_for_backend(state)
        if state.closed:
            return
        if backend is None:
            raise _given_up(state, loss, "no other backend is there", begun=begun)
        if begun:
            state.moves += 1
            self._metrics.moves.inc()
        else:
            self._metrics.retries.inc()
        _log.info("request moved", request_id=current_request_id.get(), begun=begun, attempt=state.attempts + 1)
        self._submit(state, backend)

    def _check_limits(self, state: RequestState, loss: Loss, begun: bool) -> None:
        if self._pool.is_poison(state):
            self._metrics.poisoned.inc()
            raise Internal("every backend that ran this request died", reason="POISON")
        if begun and state.moves >= self._config.max_moves:
            raise _given_up(state, loss, "it was moved as often as allowed", begun=begun)
        if not begun and state.attempts >= self._config.max_attempts:
            raise _given_up(state, loss, "it was tried as often as allowed", begun=begun)
        if not begun and not self.may_retry():
            raise _given_up(state, loss, "too many requests are being retried", begun=begun)

    def _choose(self, state: RequestState) -> Backend | None:
        spec = state.spec
        return self._policy.choose(
            self._pool.ready(spec.model), spec.prefix_hashes, session=spec.session, avoid=state.lost_on
        )

    async def _wait_for_backend(self, state: RequestState) -> Backend | None:
        until = time.monotonic() + self._config.failover_wait_seconds
        while not state.closed:
            backend = self._choose(state)
            left = until - time.monotonic()
            if backend is not None or left <= 0 or not await self._pool.changed(left):
                return backend
        return None

    def _submit(self, state: RequestState, backend: Backend) -> None:
        command = generation_pb2.SessionRequest()
        request = command.submit
        request.CopyFrom(state.spec.template)
        epoch = state.attempts
        # Unique for each attempt: a backend that comes back may not have forgotten the last one yet.
        request.request_id = f"{state.spec.request_id}.{self._suffix}.{epoch}"
        request.attempt_epoch = epoch
        if state.timings.deadline is not None:
            request.timeout_seconds = max(0.001, state.timings.deadline - time.monotonic())
        if state.has_tokens:
            _resume(request, state)
        state.attempts += 1
        backend.submit(state, command)

    def nowhere(self, model: str) -> PenstockError:
        """Make the error for a request that no backend can take."""
        retry = self._config.retry_after_seconds
        if self._pool.ready(model):
            return ResourceExhausted("every backend's queue is full", reason="QUEUE_FULL", retry_after_seconds=retry)
        if self._pool.only_mismatches():
            return mismatch()
        return Unavailable("no generation backend is ready", reason="NO_BACKEND", retry_after_seconds=retry)


def mismatch() -> FailedPrecondition:
    """Make the error for callers when tokenizer and models do not belong together."""
    return FailedPrecondition(
        "the tokenizer is not the one that the backends' models were made for", reason="TOKENIZER_MISMATCH"
    )


def _resume(request: generation_pb2.GenerateRequest, state: RequestState) -> None:
    """Add the emitted ids to the request: it goes on after them. max_new_tokens counts them, too, so it stays."""
    for index in range(state.spec.num_sequences):
        sequence = state.sequences.get(index)
        request.resumed_token_ids.append(common_pb2.TokenIds(ids=sequence.token_ids if sequence else ()))
    started_at = state.timings.started_at
    if request.config.HasField("max_time") and started_at is not None:
        request.config.max_time = max(0.001, request.config.max_time - (time.monotonic() - started_at))


def _given_up(state: RequestState, loss: Loss, why: str, *, begun: bool) -> PenstockError:
    if not begun:
        if loss.error is not None and isinstance(loss.error, Internal):
            return loss.error
        return Unavailable(f"the backend was lost and {why}", reason="BACKEND_LOST", retry_after_seconds=1.0)
    return Aborted(f"the backend was lost after tokens were sent and {why}", reason="BACKEND_LOST")
