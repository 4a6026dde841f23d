"""Attempts of a request: the first, replays before the first token, moves after it (promise 3 of the README)."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from penstock.common.errors import (
    Aborted,
    FailedPrecondition,
    Internal,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock.common.logging import get_logger
from penstock.common.request_context import current_request_id
from penstock.router.backends.ability import Ability
from penstock.router.backends.adapter_loading import AdapterLoading
from penstock.router.backends.backend import Backend
from penstock.router.backends.crash_log import Blame
from penstock.router.backends.outliers import Probe
from penstock.router.backends.patience import Patience
from penstock.router.backends.policy import Policy
from penstock.router.backends.pool import BackendPool
from penstock.router.backends.probation_queue import ProbationQueue, SuspectTurn
from penstock.router.backends.return_wait import ReturnWait
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.attempt_spans import begin_attempt
from penstock.router.requests.probation import CallProbation, Probation, StreamProbation
from penstock.router.requests.request_state import Loss, RequestState
from penstock.router.requests.suspect import Suspect
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
        self.adapters = AdapterLoading(pool, config, metrics)
        self.returns = ReturnWait(pool, config)
        # Model, and model with adapter -> number of requests that wait for their prompt's ids.
        self._preparing: Counter[tuple[str, str]] = Counter()
        self._probations = ProbationQueue(pool, config)

    def prepare(self, model: str, adapter: str = "") -> Callable[[], None]:
        """Set room aside before a prompt is computed; call the result once the request is placed or given up.

        Raises as `place`: in a flood a refusal must not wait for the prompts of all that came before it.
        """
        self.check_capacity(model, adapter)
        names = _with_model(model, adapter)
        self._preparing.update(names)
        return partial(self._prepared, names)

    def check_capacity(self, model: str, adapter: str = "") -> None:
        """Check that a request that came now could be placed, be it after its adapter is loaded. Raises as `place`,
        and NotFound."""
        if self.returns.is_awaited(model, adapter):
            return
        if adapter and not self._pool.ready(model, adapter):
            self.adapters.check(model, adapter)
            adapter = ""
        for name in _with_model(model, adapter):
            taken: float = self._preparing[name]
            for backend in self._pool.usable(*name):
                taken -= max(0, backend.load.room)
                # Most often the first one has room.
                if taken < 0:
                    break
            else:
                raise self.nowhere(*name)

    def _prepared(self, names: Sequence[tuple[str, str]]) -> None:
        for name in names:
            self._preparing[name] -= 1
            if not self._preparing[name]:
                del self._preparing[name]

    def note_request(self) -> None:
        """Count a request that was placed: it adds to the retry budget."""
        self._budget.note_request()

    def may_retry(self) -> bool:
        """Spend one more retry; False when the budget has none."""
        return self._budget.take()

    def place(self, state: RequestState) -> None:
        """Start the first attempt.

        Raises Unavailable, ResourceExhausted, FailedPrecondition or NotFound when no backend can take it, and
        InvalidArgument naming the field that none of them can do.
        """
        self.note_request()
        spec, ability = state.spec, Ability.to_generate(state.spec.template)
        outliers, probed = self._pool.outliers, self._pool.to_probe(spec.model, spec.adapter)
        if probed is not None and ability.has(probed):
            self._submit(state, probed, outliers.begin_probe(probed.key))
            return
        backend = self._choose(state, ability)
        if backend is None:
            raise self.nowhere(spec.model, spec.adapter, ability)
        self._submit(state, backend)

    async def recover(self, state: RequestState) -> None:
        """Try elsewhere after a loss.

        Raises Internal (POISON), Unavailable or NotFound (its adapter) before the first token and Aborted after it when
        that is not possible.
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
        adapter = state.spec.adapter
        if adapter and self.adapters.is_hopeless(state.spec.model, adapter):
            raise _given_up(state, loss, "no other backend has the adapter", begun=begun)
        backend = await self._wait_for_place(state, blame)
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
        """Return what backends' crashes say about a request, once it is known which of them are crashes.

        Raises Internal POISON when it is the cause.
        """
        crashes = self._pool.crashes
        # One that passed its probation is cleared before it is judged again.
        crashes.clear(suspect)
        # It is known in time by itself; the limit is for a clock that does not run.
        until = time.monotonic() + 2 * self._config.death_verdict_seconds
        while (blame := crashes.blame(suspect)) is Blame.OPEN:
            left = until - time.monotonic()
            if left <= 0:
                break
            await self._pool.changed(left)
        if blame is Blame.OWN:
            crashes.mark_poison(suspect)
            self._metrics.poisoned.inc()
            raise Internal("every backend that ran this request died", reason="POISON")
        return blame

    def _note_lost_attempt(self, state: RequestState) -> None:
        made = state.num_tokens - state.tokens_before
        state.suspect.longest_attempt = max(state.suspect.longest_attempt, made)

    def _check_limits(self, state: RequestState, loss: Loss, begun: bool) -> None:
        # What another's probation cost it is not held against it.
        excused = state.suspect.excused
        if begun and state.moves >= self._config.max_moves + excused:
            raise _given_up(state, loss, "it was moved as often as allowed", begun=begun)
        if not begun and state.attempts >= self._config.max_attempts + excused:
            raise _given_up(state, loss, "it was tried as often as allowed", begun=begun)
        if not begun and not self.may_retry():
            raise _given_up(state, loss, "too many requests are being retried", begun=begun)

    def _choose(self, state: RequestState, ability: Ability) -> Backend | None:
        spec = state.spec
        return self.choose(
            spec.model,
            spec.prefix_hashes,
            state.lost_on,
            session=spec.session,
            adapter=spec.adapter,
            ability=ability,
            is_idle_only=spec.is_idle_only,
        )

    def choose(
        self,
        model: str,
        hashes: Sequence[int],
        lost_on: set[str],
        *,
        session: str = "",
        adapter: str = "",
        ability: Ability | None = None,
        is_idle_only: bool = False,
    ) -> Backend | None:
        """Choose a backend by the policy; last one that the request was lost on, or that has a suspect on probation.

        None without `ability` is chosen; where that is None, all have it.
        """
        usable: Sequence[Backend] = self._pool.usable(model, adapter)
        # Without a list of its own for each request, the policy knows its places already.
        if ability is not None and not self._pool.are_all_own:
            usable = [one for one in usable if ability.has(one)]
        avoid = lost_on | self._probations.taken()
        return self._policy.choose(usable, hashes, session=session, avoid=avoid, is_idle_only=is_idle_only)

    async def _wait_for_place(self, state: RequestState, blame: Blame) -> Backend | None:
        """Return a backend for a lost stream, apart from other suspects if it is one; None when there is none."""
        spec, suspect = state.spec, state.suspect
        patience = Patience(self._pool, self._config, spec.model, suspect)
        ability = Ability.to_generate(spec.template, resumes=state.has_tokens)
        most = self._config.quarantine_tokens if blame is Blame.SHARED else self._config.isolation_tokens
        turn = self._turn(
            suspect,
            (spec.model, spec.adapter),
            spec.prefix_hashes,
            state.lost_on,
            partial(StreamProbation, state, most),
            session=spec.session,
            is_given_up=lambda: state.closed,
            ability=ability,
            is_idle_only=spec.is_idle_only,
        )
        backend = await self._wait_for_turn(turn, patience)
        while backend is None and not state.closed and not self._is_shared(suspect):
            if spec.adapter:
                await self.adapters.bring(spec.model, spec.adapter, patience.left())
            backend = self._choose(state, ability)
            left = patience.left()
            if backend is not None or left <= 0:
                return backend
            await self._pool.changed(left)
        return backend

    async def wait_for_place(
        self,
        suspect: Suspect,
        where: tuple[str, str],
        hashes: Sequence[int],
        lost_on: set[str],
        ability: Ability | None = None,
        *,
        is_idle_only: bool = False,
    ) -> tuple[Backend | None, CallProbation | None]:
        """Wait for a backend for a call with a single answer that was lost. The probation's `end` must be called in
        any case."""
        model, adapter = where
        patience = Patience(self._pool, self._config, model, suspect)
        made: list[CallProbation] = []

        def begin(now: float) -> CallProbation:
            made.append(CallProbation(suspect, now))
            return made[0]

        turn = self._turn(suspect, where, hashes, lost_on, begin, ability=ability, is_idle_only=is_idle_only)
        backend = await self._wait_for_turn(turn, patience)
        if backend is not None:
            return backend, made[0]
        while not self._is_shared(suspect):
            if adapter:
                await self.adapters.bring(model, adapter, patience.left())
            backend = self.choose(model, hashes, lost_on, adapter=adapter, ability=ability, is_idle_only=is_idle_only)
            left = patience.left()
            if backend is not None or left <= 0:
                break
            await self._pool.changed(left)
        return backend, None

    async def _wait_for_turn(self, turn: SuspectTurn, patience: Patience) -> Backend | None:
        return await self._probations.wait(turn, partial(self._pool.crashes.blame, turn.suspect), patience)

    def _turn(
        self,
        suspect: Suspect,
        where: tuple[str, str],
        hashes: Sequence[int],
        lost_on: set[str],
        begin: Callable[[float], Probation],
        *,
        session: str = "",
        is_given_up: Callable[[], bool] = lambda: False,
        ability: Ability | None = None,
        is_idle_only: bool = False,
    ) -> SuspectTurn:
        def choose(free: Sequence[Backend]) -> Backend:
            if self._is_shared(suspect):
                # Where a crash costs least; but who has shown only that it does no harm alone needs company.
                return min(free, key=lambda one: (needs_company and not one.in_flight, one.in_flight))
            chosen = self._policy.choose(free, hashes, session=session, avoid=lost_on, is_idle_only=is_idle_only)
            return chosen or free[0]

        needs_company = any(suspect.number in crash.past_probation for crash in suspect.crashes)
        bring = partial(self.adapters.bring, *where) if where[1] else None
        return SuspectTurn(suspect, where, choose, begin, is_given_up, bring, ability)

    def _is_shared(self, suspect: Suspect) -> bool:
        return self._pool.crashes.blame(suspect) is Blame.SHARED

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
        state.attempt_span = begin_attempt(request, backend.key, state.num_tokens)
        state.attempts += 1
        state.tokens_before = state.num_tokens
        backend.submit(state, command, probe)

    def nowhere(self, model: str, adapter: str = "", ability: Ability | None = None) -> PenstockError:
        """Make the error for a request that no backend can take."""
        retry = self._config.retry_after_seconds
        missing = ability.missing(self._pool.of_model(model)) if ability is not None else None
        if missing is not None:
            return missing
        if adapter and not self._pool.ready(model, adapter):
            return self.adapters.missing(model, adapter)
        if self._pool.ready(model):
            return ResourceExhausted("every backend's queue is full", reason="QUEUE_FULL", retry_after_seconds=retry)
        if self._pool.only_mismatches():
            return mismatch()
        return Unavailable("no generation backend is ready", reason="NO_BACKEND", retry_after_seconds=retry)


def _with_model(model: str, adapter: str) -> tuple[tuple[str, str], ...]:
    """Return what a request's place counts for: its model, and that with its adapter."""
    return ((model, ""), (model, adapter)) if adapter else ((model, ""),)


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
    request.adapter_digest = state.adapter_digest
    started_at = state.timings.started_at
    if request.config.HasField("max_time") and started_at is not None:
        request.config.max_time = max(0.001, request.config.max_time - (time.monotonic() - started_at))


def _given_up(state: RequestState, loss: Loss, why: str, *, begun: bool) -> PenstockError:
    if not begun:
        if isinstance(loss.error, Internal | NotFound):
            return loss.error
        return Unavailable(f"the backend was lost and {why}", reason="BACKEND_LOST", retry_after_seconds=1.0)
    return Aborted(f"the backend was lost after tokens were sent and {why}", reason="BACKEND_LOST")
