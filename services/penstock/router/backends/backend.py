"""Connection to one generation backend: checks that it belongs here, watches health and load, carries one Session."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

import grpc

from penstock.common.errors import PenstockError, StartupError, Unavailable, from_rpc_error
from penstock.common.logging import get_logger
from penstock.common.pace import Pace
from penstock.router.aio import Wakeup, is_cancelled, until_first, until_silent
from penstock.router.backends.adapter_list import AdapterList
from penstock.router.backends.deaths import Deaths
from penstock.router.backends.outliers import FAILURES, Outcome, Outliers, Probe, outcome_of
from penstock.router.backends.prefix_index import PrefixIndex
from penstock.router.backends.session import FORGOTTEN_LOOKS, STEP_REASONS, BackendSession
from penstock.router.config import RouterConfig, is_address, split_target
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.request_state import RequestState
from penstock.router.requests.suspect import Death, Suspect
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.serving.channels import until_serving, watch_health
from penstock.serving.transport import Channel, StreamCall, make_transport
from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

GenerationStub: TypeAlias = "generation_pb2_grpc.GenerationServiceAsyncStub"
AnswerT = TypeVar("AnswerT")
HEALTH_NAME = "penstock.v1.GenerationService"
# Above it a reported figure is none that an engine has.
_MOST_FIGURE = 1e15
_log = get_logger("penstock.router")


# Statuses that a call gets when its connection ends.
_BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.CANCELLED,
)


class BackendState(enum.Enum):
    """State of a backend: CONNECTING until first ready and after a loss; DRAINING takes nothing new."""

    CONNECTING = 1
    READY = 2
    DRAINING = 3
    MISMATCH = 4


class _Lost(Exception):
    """Loss of the connection; the message is for the log."""


@dataclass(frozen=True, slots=True)
class BackendAddress:
    """Address of a backend, and the configured target that it came from (a closed set, so usable as a label)."""

    address: str
    target: str


class Backend:
    """One generation backend. Implements policy.Candidate. Belongs to one event loop."""

    def __init__(
        self,
        where: BackendAddress,
        config: RouterConfig,
        detokenizer: Detokenizer,
        metrics: RouterMetrics,
        *,
        tokenizer_fingerprint: Callable[[], str],
        on_change: Callable[[], None],
        deaths: Deaths,
        outliers: Outliers,
    ) -> None:
        """Make it. `on_change`: its state changed. It notes in `deaths` and `outliers` what happens to its requests."""
        self.where = where
        self.state = BackendState.CONNECTING
        self.info: model_pb2.GetModelInfoResponse | None = None
        # True while a process is there that does not serve yet: it loads its model.
        self.is_starting = False
        self._config = config
        self._channel_config = _named(config, where.target)
        self._transport = make_transport(config)
        self._detokenizer = detokenizer
        self._metrics = metrics
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._on_change = on_change
        self._deaths = deaths
        self._outliers = outliers
        # The process that reported last, and the ends of its connection that it has not answered for.
        self._start_id = ""
        self._last_step = 0
        self._doubts: list[Death] = []
        # Requests of the calls with a single answer.
        self._callers: list[Suspect] = []
        # The present connection, also of a backend that is not ready; None between two.
        self._channel: Channel | None = None
        self._session: BackendSession | None = None
        self._stub: GenerationStub | None = None
        self._report = admin_pb2.Load()
        self._reported_in_flight = 0
        # Figures of the last report, and tokens by tenant that were sent since.
        self.pace = Pace()
        self.sent_tokens: dict[str, float] = {}
        self._has_report = self._serving = False
        # Number of reports so far, and of those that show progress.
        self._num_reports = self._progress = 0
        # Death that the session's engine told of, before the process went.
        self._told_death: Death | None = None
        # time.monotonic() of the last loss that was counted on this connection.
        self._lost_at = -math.inf
        self._prefixes = PrefixIndex(config.max_known_blocks)
        # As the process told last, also after it was lost: its adapters are then known, and nowhere ready.
        self.adapters = AdapterList()
        self._adapters_changed = Wakeup()

    @property
    def key(self) -> str:
        """Key that is unique among backends."""
        return self.where.address

    @property
    def in_flight(self) -> int:
        """Number of our requests at this backend, calls with a single answer included."""
        return len(self._callers) + (self._session.in_flight if self._session is not None else 0)

    def suspects(self) -> list[Suspect]:
        """Return our requests at this backend, in the eyes of those who look for the cause of a death."""
        return [*self._callers, *(self._session.suspects() if self._session is not None else ())]

    @property
    def load(self) -> float:
        """Number of requests in its last report, corrected by ours that were sent and finished since."""
        reported = self._report.waiting_requests + self._report.running_requests
        return float(max(reported + self.in_flight - self._reported_in_flight, self.in_flight))

    @property
    def is_full(self) -> bool:
        """True when another request would be refused."""
        return self.room <= 0

    @property
    def room(self) -> float:
        """Number of requests that its queue would still take; infinite when it reports no bound."""
        report = self._report
        # Requests sent since the report count as waiting until the next one; running requests are not in the queue.
        waiting = report.waiting_requests + self.in_flight - self._reported_in_flight
        return report.max_queued_requests - waiting if report.max_queued_requests else math.inf

    @property
    def kv_pressure(self) -> float:
        """Share of KV blocks held by running requests."""
        total = self._report.kv_blocks_total
        return self._report.kv_blocks_used / total if total else 0.0

    @property
    def block_size(self) -> int:
        """Tokens per KV block; 0 while unknown."""
        return self.info.kv.block_size if self.info is not None else 0

    def match(self, hashes: Sequence[int]) -> int:
        """Number of leading blocks that it probably has cached."""
        return self._prefixes.match(hashes)

    async def load_adapter(self, name: str, path: str, timeout: float) -> None:
        """Make it load an adapter; one that it has by now is no error. `path`: below its own root; empty: the name.

        Raises the backend's error; Unavailable when it is not connected, or was lost meanwhile.
        """
        channel = self._channel
        if channel is None:
            raise Unavailable("the backend is not connected", reason="NO_BACKEND")
        stub = admin_pb2_grpc.GenerationAdminServiceStub(channel.for_stubs)
        request = admin_pb2.LoadAdapterRequest(name=name, path=path)
        try:
            answer: admin_pb2.LoadAdapterResponse = await stub.LoadAdapter(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            if is_broken(error, failure):
                raise backend_lost() from error
            if failure.reason != "ADAPTER_EXISTS":
                raise failure from error
            # Another router was faster.
            answer = admin_pb2.LoadAdapterResponse(adapter=admin_pb2.Adapter(name=name, path=path))
        self.note_adapter(answer)

    def note_adapter(self, loaded: admin_pb2.LoadAdapterResponse) -> None:
        """Note an adapter that it has loaded: its next report would tell so a moment later."""
        self.adapters.add(loaded.adapter, loaded.version)
        self._on_change()

    def note_no_adapter(self, name: str, version: int = 0) -> None:
        """Note that it does not know an adapter, any more or yet."""
        self.adapters.remove(name, version)
        if not version:
            self._adapters_changed.set()
        self._on_change()

    def submit(self, state: RequestState, command: generation_pb2.SessionRequest, probe: Probe | None = None) -> None:
        """Start an attempt. Raises Unavailable when the backend was lost a moment ago."""
        if self._session is None:
            raise Unavailable("the backend was lost", reason="NO_BACKEND")
        self._prefixes.add(state.spec.prefix_hashes)
        self._metrics.backend_requests(self.where.target).inc()
        demand = state.spec.demand
        if demand is not None:
            self.sent_tokens[demand.tenant] = self.sent_tokens.get(demand.tenant, 0.0) + self.pace.tokens(demand)
        self._session.submit(state, command, probe)

    async def call(
        self,
        call: Callable[[GenerationStub, float | None], Awaitable[AnswerT]],
        hashes: Sequence[int],
        deadline: float | None,
        suspect: Suspect,
        probe: Probe | None = None,
    ) -> AnswerT:
        """Make one call with a single answer.

        `deadline` is a time of time.monotonic(); `hashes` are blocks that the backend will have cached; `suspect` is
        who makes it, if the backend dies.
        Raises the backend's error; Unavailable BACKEND_LOST when the backend was lost meanwhile.
        """
        if self._stub is None:
            raise Unavailable("the backend was lost", reason="NO_BACKEND")
        self._prefixes.add(hashes)
        self._metrics.backend_requests(self.where.target).inc()
        self._callers.append(suspect)
        outcome = Outcome.NEUTRAL
        try:
            answer = await call(self._stub, None if deadline is None else deadline - time.monotonic())
            self._note_outcome(Outcome.STARTED, probe)
            outcome = Outcome.FINISHED
            return answer
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            if is_broken(error, failure):
                self._doubt()
                outcome = Outcome.LOST
                raise backend_lost() from error
            if failure.reason in STEP_REASONS:
                if failure.reason == "STEP_FAILED":
                    self._on_step_failed(suspect)
                outcome = Outcome.LOST
                raise backend_lost() from error
            outcome = outcome_of(failure)
            raise failure from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # Our own end of the connection was closed: the backend counts as lost.
            self._doubt()
            outcome = Outcome.LOST
            raise backend_lost() from None
        finally:
            self._callers.remove(suspect)
            self._note_outcome(outcome, probe)

    def _note_outcome(self, outcome: Outcome, probe: Probe | None, has_begun: bool = False) -> None:
        """Count an outcome. A backend that is not ready has told so, and refuses by right."""
        is_failure = outcome in FAILURES
        if outcome is Outcome.LOST and probe is None and self._is_same_loss():
            return
        if is_failure:
            self._metrics.backend_failures(self.where.target, outcome.value).inc()
        if not is_failure or probe is not None or self.state is BackendState.READY:
            self._outliers.note(self.key, outcome, probe, has_begun=has_begun)

    def _is_same_loss(self) -> bool:
        """True when a loss was counted a moment ago: one connection or process takes all of its requests with it."""
        now = time.monotonic()
        if now - self._lost_at < self._config.death_verdict_seconds:
            return True
        self._lost_at = now
        return False

    def _doubt(self) -> None:
        """Note that the process may have died: a connection of it ended, with work of ours."""
        if self._told_death is not None:
            return
        running = self.suspects()
        if self._doubts and self._doubts[-1].is_death is None:
            self._deaths.add(self._doubts[-1], running)
            return
        self._new_doubt(running)

    def _new_doubt(self, suspects: list[Suspect]) -> Death:
        doubt = self._deaths.doubt(suspects)
        self._doubts.append(doubt)
        loop = asyncio.get_running_loop()
        loop.call_later(self._config.death_verdict_seconds, self._judge_by_time, doubt)
        return doubt

    def _judge_by_time(self, doubt: Death) -> None:
        """Take a process that could not be reached for so long for dead. Until it answers, if it does."""
        if doubt.is_death is not None:
            return
        is_told = doubt is self._told_death
        # One that told of its end, and takes no work any more, is on its way out.
        is_here = self._session is not None and self._has_report and (not is_told or self.state is BackendState.READY)
        self._deaths.judge(doubt, is_death=not is_here)
        if is_here:
            self._doubts.remove(doubt)
            if is_told:
                self._told_death = None

    def _judge_by_start(self, report: admin_pb2.Load) -> None:
        """Judge the doubts by the process that answers now. Services of the last release tell their steps only."""
        known, started = self._start_id, report.process_start_id
        is_other = started != known if started and known else report.step < self._last_step
        for doubt in self._doubts:
            self._deaths.judge(doubt, is_death=is_other)
        self._doubts.clear()
        if is_other:
            # A process of its own: what the one before it did is forgotten.
            self._outliers.forget(self.key)

    async def run(self) -> None:
        """Stay connected until cancelled; waits between attempts double up to the configured limit."""
        wait = self._config.reconnect_min_seconds
        while True:
            begin = time.monotonic()
            try:
                await self._connect_and_serve()
            except grpc.aio.AioRpcError as error:
                self._set_state(BackendState.CONNECTING)
                _log.info("backend connection ended", backend=self.key, code=error.code().name)
            except (_Lost, PenstockError, StartupError, asyncio.InvalidStateError) as error:
                # StartupError: a TLS or token file cannot be read, perhaps because it is being replaced.
                # InvalidStateError: a command was written to a stream that had just ended.
                _log.warning("backend lost", backend=self.key, cause=str(error))
            if time.monotonic() - begin > self._config.reconnect_max_seconds:
                wait = self._config.reconnect_min_seconds
            await asyncio.sleep(wait)
            wait = min(2 * wait, self._config.reconnect_max_seconds)

    def open_channel(self) -> contextlib.AbstractAsyncContextManager[Channel]:
        """Open a channel of its own to the backend, which no loss of the other one ends."""
        timeout = self._config.connect_timeout_seconds
        return self._transport.open_channel(self.key, self._channel_config, connect_timeout_seconds=timeout)

    @contextlib.asynccontextmanager
    async def reach(self) -> AsyncIterator[Channel]:
        """Give a channel for a call of operators: that of requests, while there are any, else one of its own.

        A backend that has no model, or another tokenizer, is dialled and left again and again. Raises StartupError as
        `open_channel`.
        """
        if self._channel is not None and self._session is not None:
            yield self._channel
            return
        async with self.open_channel() as channel:
            yield channel

    async def _connect_and_serve(self) -> None:
        async with self.open_channel() as channel:
            self._channel = channel
            try:
                await self._check_and_serve(channel)
            finally:
                self._channel = None

    async def _check_and_serve(self, channel: Channel) -> None:
        # A model that is still loading has no limits and no fingerprint yet.
        try:
            if not await until_serving(channel.for_stubs, HEALTH_NAME, partial(self._set_starting, True)):
                raise _Lost("health ended")
        finally:
            self._set_starting(False)
        stub = model_pb2_grpc.ModelServiceStub(channel.for_stubs)
        self.info = await stub.GetModelInfo(
            model_pb2.GetModelInfoRequest(), timeout=self._config.connect_timeout_seconds
        )
        if not self._belongs_here(self.info):
            self._set_state(BackendState.MISMATCH)
            return
        blocks = self.info.kv.num_blocks or self._config.max_known_blocks
        self._prefixes = PrefixIndex(min(blocks, self._config.max_known_blocks))
        await self._serve(channel)

    def _set_starting(self, is_starting: bool) -> None:
        """Note that a process is there that does not serve yet, or is not any more."""
        if is_starting is not self.is_starting:
            self.is_starting = is_starting
            # Streams that lost their backend wait longer for one that is on its way.
            self._on_change()

    def _belongs_here(self, info: model_pb2.GetModelInfoResponse) -> bool:
        ours, theirs = self._tokenizer_fingerprint(), info.tokenizer_fingerprint
        if theirs and theirs != ours:
            if self.state is not BackendState.MISMATCH:
                _log.error(
                    "backend not used: its model was made for another tokenizer",
                    backend=self.key,
                    tokenizer=ours[:12],
                    model=theirs[:12],
                )
            return False
        if not theirs:
            _log.warning("backend has no tokenizer fingerprint to compare", backend=self.key)
        return True

    async def _serve(self, channel: Channel) -> None:
        stub: GenerationStub = generation_pb2_grpc.GenerationServiceStub(channel.for_stubs)
        parse = generation_pb2.SessionResponse.FromString
        # Messages that wait are parsed as one: a message is a list of events, and merging joins the lists.
        call: StreamCall[generation_pb2.SessionResponse] = await channel.open_stream(
            f"/{HEALTH_NAME}/Session", parse, joins=True
        )
        session = BackendSession(
            call,
            self.key,
            self._detokenizer,
            self._metrics,
            self._on_step_failed,
            info=self.info,
            on_outcome=self._note_outcome,
            on_no_adapter=self.note_no_adapter,
        )
        self._session, self._stub = session, stub
        self._report, self._reported_in_flight = admin_pb2.Load(), 0
        self.pace = Pace()
        self._has_report = self._serving = False
        self._told_death = None
        self._lost_at = -math.inf
        self.adapters.connect()
        try:
            await until_first(
                session.run_reader(),
                session.run_writer(),
                self._watch_load(channel),
                self._watch_adapters(channel),
                self._watch_health(channel),
                self._watch_session(session),
                self._watch_calls(),
                self._watch_forgotten(session),
            )
            raise _Lost("a stream ended")
        finally:
            self._end_session(session)
            self._session = self._stub = None
            call.cancel()

    def _end_session(self, session: BackendSession) -> None:
        was_usable = self.state in (BackendState.READY, BackendState.DRAINING)
        # A backend that stops while it has work of ours may have died; one without work may have been told to stop. One
        # that drained was told to, even if its grace left work unfinished: no request is to blame for a restart.
        if self._told_death is not None:
            self._deaths.judge(self._told_death, is_death=True)
        elif was_usable and self.in_flight and not self._report.draining:
            self._doubt()
            self._note_outcome(Outcome.LOST, None)
        self._last_step = self._report.step
        self._set_state(BackendState.CONNECTING)
        self._prefixes.clear()
        if was_usable:
            self._metrics.backend_losses.labels(self.where.target).inc()
        session.lose()

    async def _watch_load(self, channel: Channel) -> None:
        stub = admin_pb2_grpc.GenerationAdminServiceStub(channel.for_stubs)
        request = admin_pb2.WatchLoadRequest(min_interval_seconds=self._config.load_interval_seconds)
        reports = stub.WatchLoad(request)
        try:
            async for response in reports:
                self._take_report(response.load)
        finally:
            reports.cancel()

    def _on_step_failed(self, suspect: Suspect) -> None:
        """Note that a step broke in which a request was: the process ends, and only such requests may be the cause."""
        if self._told_death is not None:
            self._deaths.add(self._told_death, [suspect])
            return
        if self._doubts and self._doubts[-1].is_death is None:
            # A connection that ended before its engine's last word was read: one end is not two deaths.
            self._deaths.judge(self._doubts.pop(), is_death=False)
        self._told_death = self._new_doubt([suspect])

    def _take_report(self, report: admin_pb2.Load) -> None:
        self._num_reports += 1
        is_busy = report.HasField("step_seconds") and not report.step_overdue
        self._progress += is_busy or report.step != self._report.step
        was_full = self.is_full
        if not self._has_report:
            self._judge_by_start(report)
        self._report, self._has_report, self._start_id = report, True, report.process_start_id
        self.pace = to_pace(report)
        self.sent_tokens.clear()
        self._reported_in_flight = self.in_flight
        if self.adapters.note_version(report.adapters_version):
            self._adapters_changed.set()
        self._refresh_state()
        if was_full and not self.is_full:
            # Streams that lost their backend may wait for the room.
            self._on_change()

    async def _watch_adapters(self, channel: Channel) -> None:
        """Ask for the adapters whenever a report says that they changed."""
        stub = admin_pb2_grpc.GenerationAdminServiceStub(channel.for_stubs)
        while True:
            await self._adapters_changed.wait()
            while self.adapters.note_version(self._report.adapters_version):
                try:
                    found: admin_pb2.ListAdaptersResponse = await stub.ListAdapters(
                        admin_pb2.ListAdaptersRequest(), timeout=self._config.connect_timeout_seconds
                    )
                except grpc.aio.AioRpcError as error:
                    # Requests go on, by what was known.
                    _log.warning("backend does not tell its adapters", backend=self.key, code=error.code().name)
                    self.adapters.give_up()
                    self._refresh_state()
                    await asyncio.sleep(self._config.reconnect_max_seconds)
                else:
                    self.adapters.take(found)
                    self._refresh_state()
                    self._on_change()

    async def _watch_health(self, channel: Channel) -> None:
        async with contextlib.aclosing(watch_health(channel.for_stubs, HEALTH_NAME)) as updates:
            async for is_serving in updates:
                self._serving = is_serving
                self._refresh_state()

    async def _watch_session(self, session: BackendSession) -> None:
        """Raise _Lost once a session with requests has been silent for the stall timeout.

        Only its own messages count: reports come by another connection, and from a process whose engine may hang.
        """
        limit = self._config.stall_timeout_seconds
        await until_silent(limit, lambda: session.frames, lambda: session.in_flight > 0)
        raise _Lost(f"its session was silent for {limit:g} s with {session.in_flight} requests")

    async def _watch_calls(self) -> None:
        """Raise _Lost once calls with a single answer have waited for the stall timeout without progress."""
        limit = self._config.stall_timeout_seconds
        await until_silent(limit, lambda: self._progress, lambda: bool(self._callers))
        raise _Lost(f"no progress for {limit:g} s with {len(self._callers)} calls")

    async def _watch_forgotten(self, session: BackendSession) -> None:
        """Give attempts up that stand still for the stall timeout while the backend has fewer requests than ours."""
        while True:
            await asyncio.sleep(self._config.stall_timeout_seconds / FORGOTTEN_LOOKS)
            known = self._report.waiting_requests + self._report.running_requests
            session.look_for_forgotten(known, self._num_reports)

    def _refresh_state(self) -> None:
        report = self._report
        ready = report.state in (common_pb2.MODEL_STATE_UNSPECIFIED, common_pb2.MODEL_STATE_READY)
        # One that was lost because its engine does not get on would be lost again.
        is_stuck = report.step_hung or (report.step_overdue and self.state is not BackendState.READY)
        # Of a process that has any adapter, requests are not placed before it is known which.
        knows_adapters = self.adapters.is_known or not report.adapters_version
        if self._serving and self._has_report and knows_adapters and ready and not report.draining and not is_stuck:
            if self.state is not BackendState.READY:
                self._outliers.half_open(self.key)
            self._set_state(BackendState.READY)
        elif self.state is BackendState.READY:
            self._set_state(BackendState.DRAINING)

    def _set_state(self, state: BackendState) -> None:
        if state is not self.state:
            self.state = state
            _log.info("backend state", backend=self.key, state=state.name)
            self._on_change()


def to_pace(report: admin_pb2.Load) -> Pace:
    """Return a report's figures; those of a backend that reports none, or such as none has, refuse nothing."""
    if not report.HasField("pace"):
        return Pace()
    pace = report.pace
    figures = (
        pace.tokens_per_second,
        pace.step_seconds,
        pace.least_step_seconds,
        pace.full_step_seconds,
        pace.output_tokens,
        pace.headroom,
        pace.uneven_seconds,
        *pace.output_shares,
        *(entry.tokens for entry in pace.waiting),
    )
    # NaN fails the comparison, and would stay in every sum.
    if not all(abs(figure) < _MOST_FIGURE for figure in figures):
        return Pace()
    return Pace(
        tokens_per_second=pace.tokens_per_second,
        step_seconds=pace.step_seconds,
        least_step_seconds=pace.least_step_seconds,
        full_step_seconds=pace.full_step_seconds,
        output_tokens=pace.output_tokens,
        output_shares=tuple(pace.output_shares),
        batch_tokens=max(pace.batch_tokens, 1),
        headroom=pace.headroom,
        is_busy=pace.is_busy,
        waiting={entry.fair_share_key: entry.tokens for entry in pace.waiting},
        uneven_seconds=pace.uneven_seconds,
    )


def is_broken(error: grpc.aio.AioRpcError, failure: PenstockError) -> bool:
    """True when a call ended since its connection did: a status without a reason is not the backend's."""
    return failure.reason == "UNKNOWN" and error.code() in _BROKEN


def backend_lost() -> Unavailable:
    """Make the error of a call whose backend was lost."""
    return Unavailable("the backend was lost", reason="BACKEND_LOST", retry_after_seconds=1.0)


def _named(config: RouterConfig, target: str) -> RouterConfig:
    """Return the name in the certificate: the configured one, also when the connection goes to one of its addresses."""
    host, _ = split_target(target, "--backend")
    if config.channel_tls_server_name is not None or is_address(host):
        return config
    return dataclasses.replace(config, channel_tls_server_name=host) if config.channel_tls_ca else config
