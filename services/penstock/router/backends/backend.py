"""One generation backend: its parts put together, and the requests that it carries."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from penstock.common.block_hashes import SCHEME
from penstock.common.errors import PenstockError, Unavailable, from_rpc_error
from penstock.router.aio import is_cancelled, until_first, until_silent
from penstock.router.backend_targets import scheme_of
from penstock.router.backends.backend_adapters import BackendAdapters
from penstock.router.backends.crash_log import CrashLog
from penstock.router.backends.crash_watch import CrashWatch
from penstock.router.backends.discovery import BackendAddress
from penstock.router.backends.link import Link, LinkLost, backend_lost, is_broken
from penstock.router.backends.load_report import LoadReport, from_load
from penstock.router.backends.load_view import LoadView
from penstock.router.backends.outcome_count import OutcomeCount
from penstock.router.backends.outliers import Outcome, Outliers, Probe, outcome_of
from penstock.router.backends.prefix_index import BlockNames, PrefixIndex
from penstock.router.backends.session import FORGOTTEN_LOOKS, STEP_REASONS, BackendSession
from penstock.router.config import RouterConfig
from penstock.router.engines.backend_connection import BackendCalls, BackendConnection
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.request_state import RequestState
from penstock.router.requests.suspect import Suspect
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.serving.transport import Channel
from penstock.v1 import generation_pb2, model_pb2, tokenizer_pb2

AnswerT = TypeVar("AnswerT")


class Backend:
    """One generation backend. Implements policy.Candidate. Belongs to one event loop.

    `link` is the connection and the backend's state, `load` what it reported and what was sent since, `adapters` those
    that it has. What becomes of its requests goes to the router's crash log and to `outliers`.
    """

    def __init__(
        self,
        where: BackendAddress,
        config: RouterConfig,
        detokenizer: Detokenizer,
        metrics: RouterMetrics,
        *,
        tokenizer: Callable[[], tokenizer_pb2.GetTokenizerResponse],
        on_change: Callable[[], None],
        on_kept: Callable[[Backend, Sequence[int]], None],
        crashes: CrashLog,
        outliers: Outliers,
    ) -> None:
        """Make it; `link.run` connects. `tokenizer` returns the facts of ours; `on_change`: its state changed;
        `on_kept`: it told of blocks of these names."""
        self.where = where
        # Unique among backends.
        self.key = where.address
        # True for a generation service of ours; False for another engine.
        self.is_own = not scheme_of(where.target)
        # Of the last connection.
        self._keeps_salts = self.is_own
        self.link = Link(where, config, tokenizer=tokenizer, serve=self._serve, on_change=on_change)
        self.load = LoadView(lambda: self.in_flight, lambda: self._idle_in_flight)
        self.adapters = BackendAdapters(self.link, config, on_change)
        verdict_seconds = config.death_verdict_seconds
        self._crashes = CrashWatch(
            crashes, verdict_seconds, suspects=self.suspects, takes_work=lambda: self.link.is_ready
        )
        self._outcomes = OutcomeCount(where, outliers, metrics, verdict_seconds, takes_work=lambda: self.link.is_ready)
        self._config = config
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._on_change = on_change
        self._on_kept = on_kept
        self._outliers = outliers
        self._prefixes = PrefixIndex(config.max_known_blocks)
        # Of the present connection; None between two.
        self._session: BackendSession | None = None
        self._connection: BackendConnection | None = None
        # Requests of the calls with a single answer.
        self._callers: list[Suspect] = []
        self._idle_callers = 0

    @property
    def in_flight(self) -> int:
        """Number of our requests at this backend, calls with a single answer included."""
        return len(self._callers) + (self._session.in_flight if self._session is not None else 0)

    @property
    def _idle_in_flight(self) -> int:
        """Number of those that use idle capacity only."""
        return self._idle_callers + (self._session.idle_in_flight if self._session is not None else 0)

    def suspects(self) -> list[Suspect]:
        """Return our requests at this backend, in the eyes of those who look for the cause of a crash."""
        return [*self._callers, *(self._session.suspects() if self._session is not None else ())]

    def refusal(self, request: generation_pb2.GenerateRequest, *, resumes: bool = False) -> PenstockError | None:
        """Return the error of a request that this kind of backend cannot do. `resumes`: tokens were sent before."""
        return None if self._connection is None else self._connection.refusal(request, resumes=resumes)

    def lacks_call(self, method: str) -> PenstockError | None:
        """Return the error of a call with a single answer that this kind of backend does not have."""
        return None if self._connection is None else self._connection.lacks_call(method)

    def match(self, hashes: Sequence[int]) -> int:
        """Number of leading blocks that it probably has cached."""
        return self._prefixes.match(hashes if self._keeps_salts else self._names(hashes))

    def _names(self, hashes: Sequence[int]) -> Sequence[int]:
        """Return the names by which it knows blocks: most other engines have no salt."""
        return hashes if self._keeps_salts or not isinstance(hashes, BlockNames) else hashes.plain

    def submit(self, state: RequestState, command: generation_pb2.SessionRequest, probe: Probe | None = None) -> None:
        """Start an attempt. Raises Unavailable when the backend was lost a moment ago."""
        if self._session is None:
            raise Unavailable("the backend was lost", reason="NO_BACKEND")
        self._prefixes.add(self._names(state.spec.prefix_hashes))
        self._metrics.backend_requests(self.where.target).inc()
        if state.spec.demand is not None:
            self.load.note_sent(state.spec.demand)
        self._session.submit(state, command, probe)

    async def call(
        self,
        call: Callable[[BackendCalls, float | None], Awaitable[AnswerT]],
        hashes: Sequence[int],
        deadline: float | None,
        suspect: Suspect,
        probe: Probe | None = None,
        *,
        is_idle_only: bool = False,
    ) -> AnswerT:
        """Make one call with a single answer.

        `deadline` is a time of time.monotonic(); `hashes` are blocks that the backend will have cached; `suspect` is
        who makes it, if the backend crashes; `is_idle_only`: it uses idle capacity only.
        Raises the backend's error; Unavailable BACKEND_LOST when the backend was lost meanwhile.
        """
        if self._connection is None:
            raise Unavailable("the backend was lost", reason="NO_BACKEND")
        self._prefixes.add(self._names(hashes))
        self._metrics.backend_requests(self.where.target).inc()
        self._callers.append(suspect)
        self._idle_callers += is_idle_only
        outcome = Outcome.NEUTRAL
        try:
            answer = await call(self._connection.calls, None if deadline is None else deadline - time.monotonic())
            self._outcomes.note(Outcome.STARTED, probe)
            outcome = Outcome.FINISHED
            return answer
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            if is_broken(error, failure):
                self._crashes.note_broken_call()
                outcome = Outcome.LOST
                raise backend_lost() from error
            if failure.reason in STEP_REASONS:
                if failure.reason == "STEP_FAILED":
                    self._crashes.note_failed_step(suspect)
                outcome = Outcome.LOST
                raise backend_lost() from error
            outcome = outcome_of(failure)
            raise failure from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # Our own end of the connection was closed: the backend counts as lost.
            self._crashes.note_broken_call()
            outcome = Outcome.LOST
            raise backend_lost() from None
        finally:
            self._callers.remove(suspect)
            self._idle_callers -= is_idle_only
            self._outcomes.note(outcome, probe)

    async def _serve(
        self, channel: Channel, connection: BackendConnection, info: model_pb2.GetModelInfoResponse
    ) -> None:
        """Carry requests over a connection until the first of its streams ends. Raises LinkLost."""
        # Blocks of tokens: each group of layers has some for the same tokens.
        bundle = sum(group.num_blocks for group in info.kv.groups) or 1
        blocks = info.kv.num_blocks // bundle or self._config.max_known_blocks
        most = self._config.max_known_blocks
        self._prefixes = PrefixIndex(min(blocks, most), most)
        call = await connection.open_session()
        session = BackendSession(
            call,
            self.key,
            self._detokenizer,
            self._metrics,
            self._crashes.note_failed_step,
            info=info,
            on_outcome=self._outcomes.note,
            on_no_adapter=self.adapters.note_missing,
        )
        self._session, self._connection = session, connection
        self._keeps_salts = connection.keeps_salts
        for part in (self.load, self._crashes, self._outcomes, self.adapters):
            part.connect()
        try:
            await until_first(
                session.run_reader(),
                session.run_writer(),
                self._watch_load(connection),
                self.adapters.watch(channel, self._refresh_state),
                self.link.watch_health(connection, self._refresh_state),
                self._watch_session(session),
                self._watch_calls(),
                self._watch_forgotten(session),
            )
            raise LinkLost("a stream ended")
        finally:
            self._end_session(session)
            self._session = self._connection = None
            call.cancel()
            await connection.close()

    def _end_session(self, session: BackendSession) -> None:
        was_up = self.link.is_up
        # A backend that stops while it has work of ours may have crashed; one without work may have been told to stop.
        # One that drained was told to, even if its grace left work unfinished: no request is to blame for a restart.
        may_be_crash = was_up and self.in_flight > 0 and not self.load.report.is_draining
        if self._crashes.disconnect(may_be_crash=may_be_crash):
            self._outcomes.note(Outcome.LOST)
        self.link.show_lost()
        self._prefixes.clear()
        if was_up:
            self._metrics.backend_losses.labels(self.where.target).inc()
        session.lose()

    async def _watch_load(self, connection: BackendConnection) -> None:
        async with contextlib.aclosing(connection.watch_loads()) as reports:
            async for report in reports:
                told = report.prefixes
                if told.scheme == SCHEME:
                    self._prefixes.take(told.kept, told.gone, begins_anew=told.begins_anew)
                    self._on_kept(self, told.kept)
                self._take_report(from_load(report.load))

    def _take_report(self, report: LoadReport) -> None:
        was_full = self.load.is_full
        if self._crashes.take_report(report.start_id, report.step):
            # A process of its own: what the one before it did is forgotten.
            self._outliers.forget(self.key)
        self.load.take(report)
        self.adapters.take_version(report.adapters_version)
        self._refresh_state()
        if was_full and not self.load.is_full:
            # Streams that lost their backend may wait for the room.
            self._on_change()

    def _refresh_state(self) -> None:
        """Show whether it takes work, by its health, its report and its adapters."""
        report, was_ready = self.load.report, self.link.is_ready
        # One that was lost because its engine does not get on would be lost again.
        is_stuck = report.is_hung or (report.is_overdue and not was_ready)
        is_able = self.load.has_report and report.is_loaded and not report.is_draining and not is_stuck
        takes_work = self.link.is_healthy and is_able and self.adapters.are_known
        if takes_work and not was_ready:
            self._outliers.half_open(self.key)
        self.link.show(takes_work=takes_work)

    async def _watch_session(self, session: BackendSession) -> None:
        """Raise LinkLost once a session with requests has been silent for the stall timeout.

        Only its own messages count. Reports come by another connection, also while the engine hangs.
        """
        limit = self._config.stall_timeout_seconds
        await until_silent(limit, lambda: session.frames, lambda: session.in_flight > 0)
        raise LinkLost(f"its session was silent for {limit:g} s with {session.in_flight} requests")

    async def _watch_calls(self) -> None:
        """Raise LinkLost once calls with a single answer have waited for the stall timeout without progress."""
        limit = self._config.stall_timeout_seconds
        await until_silent(limit, lambda: self.load.progress, lambda: bool(self._callers))
        raise LinkLost(f"no progress for {limit:g} s with {len(self._callers)} calls")

    async def _watch_forgotten(self, session: BackendSession) -> None:
        """Give attempts up that stand still for the stall timeout while the backend has fewer requests than ours."""
        while True:
            await asyncio.sleep(self._config.stall_timeout_seconds / FORGOTTEN_LOOKS)
            session.look_for_forgotten(self.load.report.requests, self.load.num_reports)
