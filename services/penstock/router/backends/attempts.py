"""Attempts of a request: the first, replays before the first token, moves after it (promise 3 of the README)."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
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
from penstock.router.backends.deaths import Blame
from penstock.router.backends.outliers import Probe
from penstock.router.backends.policy import Policy
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.request_state import Loss, RequestState
from penstock.router.requests.suspect import Suspect
from penstock.v1 import common_pb2, generation_pb2

# A trial ends with a token, for which nothing is called.
_TRIAL_LOOK_SECONDS = 0.02
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


class Trial(ABC):
    """Trial of one of several requests that may be to blame for deaths, with its next attempt."""

    def __init__(self, suspect: Suspect) -> None:
        """Begin it."""
        self.suspect = suspect
        # Those that it is tried for: what comes after it passed is another matter.
        self.deaths = tuple(suspect.deaths)
        suspect.is_tried = True

    @property
    @abstractmethod
    def has_passed(self) -> bool:
        """True once it has gone on for long enough, or to its end."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """True once it has passed, was given up, or was lost again."""


class StreamTrial(Trial):
    """Trial of a stream, which passes by tokens."""

    def __init__(self, state: RequestState, needed: int) -> None:
        """Begin it. It is passed with `needed` tokens more."""
        super().__init__(state.suspect)
        self._state = state
        self._attempt = state.attempts
        self._tokens = state.num_tokens + needed

    @property
    def has_passed(self) -> bool:
        return self._state.num_tokens >= self._tokens or self._state.finished is not None

    @property
    def is_over(self) -> bool:
        state = self._state
        return self.has_passed or state.closed or (state.attempts > self._attempt and state.attempt is None)


class CallTrial(Trial):
    """Trial of a call with a single answer, which passes by that."""

    def __init__(self, suspect: Suspect) -> None:
        """Begin it. Whoever makes the call notes what becomes of it."""
        super().__init__(suspect)
        self._is_over = self._has_passed = False

    def end(self, *, has_passed: bool) -> None:
        """Note the call's end."""
        self._is_over, self._has_passed = True, has_passed

    @property
    def has_passed(self) -> bool:
        return self._has_passed

    @property
    def is_over(self) -> bool:
        return self._is_over


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
        # Key of a backend -> the suspect that is being tried there.
        self._trials: dict[str, Trial] = {}

    def prepare(self, model: str) -> Callable[[], None]:
        """Set room aside before a prompt is computed; call the result once the request is placed or given up.

        Raises as `place`: in a flood a refusal must not wait for the prompts of all that came before it.
        """
        self.check_capacity(model)
        self._preparing[model] += 1
        return partial(self._prepared, model)

    def check_capacity(self, model: str) -> None:
        """Check that a request that came now could be placed. Raises as `place`."""
        if sum(max(0, backend.room) for backend in self._pool.usable(model)) <= self._preparing[model]:
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
        outliers, probed = self._pool.outliers, self._pool.to_probe(state.spec.model)
        if probed is not None:
            self._submit(state, probed, outliers.begin_probe(probed.key))
            return
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
        self._note_lost_attempt(state)
        blame = await self.check_blame(state.suspect)
        if state.closed:
            return
        self._check_limits(state, loss, begun)
        if blame is Blame.SHARED:
            backend = await self._wait_for_trial(state)
        else:
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

    async def check_blame(self, suspect: Suspect) -> Blame:
        """Return what backends' deaths say about a request, once it is known which of them are deaths.

        Raises Internal POISON when it is the cause.
        """
        deaths = self._pool.deaths
        # One that passed its trial is cleared before it is judged again.
        self._on_trial()
        # A verdict comes in time by itself; the limit is for a clock that does not run.
        until = time.monotonic() + 2 * self._config.death_verdict_seconds
        while (blame := deaths.blame(suspect)) is Blame.OPEN:
            left = until - time.monotonic()
            if left <= 0:
                break
            await self._pool.changed(left)
        if blame is Blame.OWN:
            deaths.convict(suspect)
            self._metrics.poisoned.inc()
            raise Internal("every backend that ran this request died", reason="POISON")
        return blame

    def _note_lost_attempt(self, state: RequestState) -> None:
        made = state.num_tokens - state.tokens_before
        state.suspect.longest_attempt = max(state.suspect.longest_attempt, made)

    def _check_limits(self, state: RequestState, loss: Loss, begun: bool) -> None:
        # What another's trial cost it is not held against it.
        excused = state.suspect.excused
        if begun and state.moves >= self._config.max_moves + excused:
            raise _given_up(state, loss, "it was moved as often as allowed", begun=begun)
        if not begun and state.attempts >= self._config.max_attempts + excused:
            raise _given_up(state, loss, "it was tried as often as allowed", begun=begun)
        if not begun and not self.may_retry():
            raise _given_up(state, loss, "too many requests are being retried", begun=begun)

    def _choose(self, state: RequestState) -> Backend | None:
        spec = state.spec
        return self.choose(spec.model, spec.prefix_hashes, state.lost_on, session=spec.session)

    def choose(self, model: str, hashes: Sequence[int], lost_on: set[str], *, session: str = "") -> Backend | None:
        """Choose a backend by the policy; one that the request was lost on, or a suspect is tried on, comes last."""
        avoid = lost_on | self._on_trial() if self._trials else lost_on
        return self._policy.choose(self._pool.usable(model), hashes, session=session, avoid=avoid)

    def _on_trial(self) -> set[str]:
        """Return the keys of backends with a trial that is not over. What is over is judged."""
        for key, trial in list(self._trials.items()):
            if trial.is_over:
                del self._trials[key]
                trial.suspect.is_tried = False
                if trial.has_passed:
                    self._pool.deaths.acquit(trial.suspect, trial.deaths)
        return set(self._trials)

    async def _wait_for_trial(self, state: RequestState) -> Backend | None:
        def begin() -> Trial:
            return StreamTrial(state, min(state.suspect.longest_attempt + 1, self._config.quarantine_tokens))

        return await self._place_for_trial(state.spec.model, begin, lambda: state.closed)

    async def wait_for_trial(self, model: str, suspect: Suspect) -> tuple[Backend, CallTrial] | None:
        """Wait for a backend to try a call with a single answer on. The trial's `end` must be called in any case."""
        made: list[CallTrial] = []

        def begin() -> Trial:
            made.append(CallTrial(suspect))
            return made[0]

        backend = await self._place_for_trial(model, begin, lambda: False)
        return None if backend is None else (backend, made[0])

    async def _place_for_trial(
        self, model: str, begin: Callable[[], Trial], is_given_up: Callable[[], bool]
    ) -> Backend | None:
        """Return a backend on which no other suspect is being tried: the one where a death costs least."""
        until = time.monotonic() + self._config.quarantine_wait_seconds
        while not is_given_up():
            taken = self._on_trial()
            free = [one for one in self._pool.usable(model) if not one.is_full and one.key not in taken]
            if free:
                backend = min(free, key=lambda one: one.in_flight)
                self._trials[backend.key] = begin()
                return backend
            left = until - time.monotonic()
            if left <= 0:
                break
            await self._pool.changed(min(left, _TRIAL_LOOK_SECONDS))
        return None

    async def _wait_for_backend(self, state: RequestState) -> Backend | None:
        until = time.monotonic() + self._config.failover_wait_seconds
        while not state.closed:
            backend = self._choose(state)
            left = until - time.monotonic()
            if backend is not None or left <= 0 or not await self._pool.changed(left):
                return backend
        return None

    def _submit(self, state: RequestState, backend: Backend, probe: Probe | None = None) -> None:
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
        state.tokens_before = state.num_tokens
        backend.submit(state, command, probe)

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
