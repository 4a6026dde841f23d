"""The engine: requests in, one step at a time, outputs out. Synchronous; one thread."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from penstock.common.errors import (
    Aborted,
    Cancelled,
    FailedPrecondition,
    Internal,
    NotFound,
    PenstockError,
    Unavailable,
)
from penstock.common.idle_only import IDLE_TENANT
from penstock.common.logging import get_logger
from penstock.generation.core.request import FinishReason, Purpose, RequestOutput
from penstock.generation.core.step import DraftKind, SchedulerOutput
from penstock.generation.engine.acceptance import (
    check_capacity,
    check_deadline,
    demand_of,
    output_limit,
)
from penstock.generation.engine.block_copies import num_swapped
from penstock.generation.engine.caller_blocks import CallerBlocks
from penstock.generation.engine.decoding.base import no_token_left
from penstock.generation.engine.decoding.mode_registry import MODES, ModeRegistry
from penstock.generation.engine.draft_costs import DraftCosts
from penstock.generation.engine.drafts import share_room
from penstock.generation.engine.dump import dump_engine
from penstock.generation.engine.end_times import EndTimes, wait_too_long
from penstock.generation.engine.engine_listener import EngineListener, Listeners
from penstock.generation.engine.event_counter import EventCounter
from penstock.generation.engine.fairness.fair_turns import FairTurns
from penstock.generation.engine.fairness.idle_rest import IdleRest
from penstock.generation.engine.group import GroupState, SequenceGroup
from penstock.generation.engine.ngram_memory import NgramMemory
from penstock.generation.engine.pace_meter import PaceMeter
from penstock.generation.engine.request_report import RequestReport
from penstock.generation.engine.scheduler import Scheduler
from penstock.generation.engine.stats import EngineLoad, EngineStats, MemorySize, StepSample
from penstock.generation.engine.step_watch import StepWatch
from penstock.generation.engine.stopping import stop_criteria

if TYPE_CHECKING:
    from penstock.common.pace import Demand, Pace
    from penstock.generation.core.block_store import BlockStore
    from penstock.generation.core.request import Emission, Request, SequenceFinish
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import BlockCopy, Drafter, DraftRequest, Runner, RunnerOutput, SampledToken
    from penstock.generation.engine.block_pool import BlockPool
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.decoding.base import Decision
    from penstock.generation.engine.dump import EngineDump
    from penstock.generation.engine.prefix_log import PrefixLog
    from penstock.generation.engine.swap_or_recompute import SwapPolicy
    from penstock.text.token_bytes import TokenBytes

_log = get_logger(__name__)


class Engine:
    """Engine over one KV pool. Every accepted request gets exactly one FinishedOutput in every case.

    Only `check` may be called from other threads. When the strategy of a request raises, only this request ends, with
    INTERNAL. An exception of the runner or the scheduler leaves `step`: the engine is then unusable, and `fail_all`
    ends every live request.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        stop_text: TokenBytes | None,
        *,
        modes: ModeRegistry = MODES,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
        listeners: Iterable[EngineListener] = (),
        store: BlockStore | None = None,
    ) -> None:
        """`stop_text` None: no request may have stop strings. `clock` gives times comparable with those of Request.
        `store` keeps blocks behind the host pool; the caller closes it."""
        self.config = config
        self.stats = EngineStats()
        self.watch = StepWatch(config)
        self._runner = runner
        self._drafter = drafter
        self._stop_text = stop_text
        self._modes = modes
        self._clock = clock
        self._scheduler = Scheduler(config, self.stats, store)
        self._counter = EventCounter(self.stats)
        # Shares of a tenant, as numbers.
        self.shares = self._scheduler.shares
        self._draft_costs = DraftCosts(self.stats)
        self._listeners = Listeners((self._counter, self.watch, self._draft_costs, *listeners))
        # Groups with outputs that the caller has not taken yet, in the order of their first one.
        self._dirty: dict[SequenceGroup, None] = {}
        # Blocks that callers hold, and the rest for requests.
        self.caller_blocks = CallerBlocks(config, self._scheduler, self._dirty, self._listeners)
        self._groups: dict[str, SequenceGroup] = {}
        # Changed between steps only; read by any thread.
        self.weights_version = 0
        self._end_times = EndTimes()
        self._meter = PaceMeter(config)
        self._memory = NgramMemory(config, clock)
        # Replaced by the replay of a trace.
        self.turns = FairTurns(config.tenant_slowdown)
        self._idle_rest = IdleRest(config.idle_share)
        # End of the last step, while work goes on: the time from here on counts for the next step.
        self._last_step_end: float | None = None
        # End of the last pause of the steps; infinite while there is one.
        self._paused_until = -math.inf
        # The last step had no room for all waiting work.
        self._leaves_waiting = False
        self._order = itertools.count()
        self._seq_ids = itertools.count()

    @property
    def policy(self) -> SwapPolicy:
        """Policy of preemptions with a host pool; the replay of a trace replaces it."""
        return self._scheduler.policy

    @policy.setter
    def policy(self, policy: SwapPolicy) -> None:
        self._scheduler.policy = policy

    @property
    def has_work(self) -> bool:
        """True when `step` would compute or return something."""
        return self._scheduler.has_work or bool(self._dirty)

    def now(self) -> float:
        """Return the time of the engine's clock. Thread-safe."""
        return self._clock()

    def rest_seconds(self) -> float:
        """Return the seconds until the next step is due: requests of idle capacity, alone here, rest beside callers."""
        return self._idle_rest.seconds(self._clock()) if self._scheduler.waiting.is_idle_alone else 0.0

    @property
    def num_waiting(self) -> int:
        """Number of accepted requests that are not running."""
        return len(self._scheduler.waiting)

    def num_waiting_of(self, tenant: str) -> int:
        """Return the number of a tenant's accepted requests that are not running."""
        return self._scheduler.waiting.num_of(tenant)

    def check(self, request: Request) -> None:
        """Raise when `request` is too large for this engine; see `acceptance.check_capacity`. Thread-safe."""
        check_capacity(self.caller_blocks.room_of(request, self.weights_version), self._modes, request)

    def check_deadline(self, request: Request, pace: Pace, coming: Mapping[str, float]) -> float:
        """Raise when `request` would end too late; see `acceptance.check_deadline`. Thread-safe."""
        return check_deadline(self.config, self._modes, request, self._clock(), pace, coming)

    def add(self, request: Request) -> None:
        """Accept a request that has passed `check`.

        Raises ValueError for the id of a live request and for stop strings without `stop_text`, its strategy's error
        for wrong resumed ids, and the errors of `check` if blocks were claimed meanwhile.
        """
        if request.request_id in self._groups:
            raise ValueError("request id is live")
        request.weights_version = self.weights_version
        if self.caller_blocks.are_any:
            # It may have been checked before the blocks were claimed.
            self.check(request)
        if request.params.mode.recalls_outputs:
            request.past_outputs = self._memory.of((request.fair_share_key, request.block_salt))
        request.draft_costs = self._draft_costs
        request.has_draft_head = self._drafter is not None and self._drafter.kind is DraftKind.DRAFT_HEAD
        context = () if request.begins_text else request.known_prompt_ids
        criteria = stop_criteria(
            request.params, output_limit(self.config, request), self._stop_text, context, request.thought
        )
        strategy = self._modes.make_strategy(request, criteria, lambda: next(self._seq_ids))
        sequences, preset_events = strategy.start()
        key = (request.arrival_time - request.priority * self.config.priority_seconds, next(self._order))
        pace = self._pace(self._scheduler.num_running_sequences, self._clock())
        demand = demand_of(self.config, request, self._modes.most_sequences(request.params))
        group = SequenceGroup(
            request,
            strategy,
            RequestReport(request, self._clock, preset_events, lambda: self.weights_version),
            key,
            sequences,
            cost=self._cost(request, pace, demand),
            expected=self._meter.expect(demand, pace),
        )
        self._groups[request.request_id] = group
        self._scheduler.add(group)
        for hear in self._listeners.added:
            hear(group)
        self._end_times.accept(group)
        if not sequences:
            self._emit(group, [])
            self._close(group)

    def abort(self, request_id: str, error: PenstockError | None = None) -> bool:
        """End a request now: its blocks are free at once, `step` returns its FinishedOutput. False: it is not live.

        Its sequences end ERROR with `error` (other than Cancelled), else ABORTED.
        """
        group = self._groups.get(request_id)
        if group is None:
            return False
        self._cut_off(group, error)
        return True

    def step(self) -> list[RequestOutput]:
        """Run at most one forward pass. Return outputs by request, of this step and of calls before it."""
        started = self._clock()
        scheduler, stats, waiting = self._scheduler, self.stats, self._scheduler.waiting
        if started > self._end_times.earliest:
            self._end_overdue(started)
        if len(waiting) and self._end_times.have_latest_starts:
            self._end_hopeless(started)
        rejected, hits, generated = stats.rejected_draft_tokens, stats.prefix_hit_tokens, stats.generated_tokens
        waiting.now = started
        scheduler.resting = self._resting()
        output = scheduler.schedule()
        if output.scheduled:
            for hear_scheduled in self._listeners.scheduled:
                hear_scheduled(scheduler, output)
            self._note_admitted(started)
            num_tokens = self.watch.num_tokens
            scheduled = self._clock()
            if self._drafter is not None:
                # Its data for sequences that wait for their blocks would take the room of others.
                self._drafter.release(output.released + output.parked)
            result = self._runner.execute(output)
            executed = self._clock()
            if output.copies:
                for hear_copied in self._listeners.copied:
                    hear_copied(output, result)
            if scheduler.host is not None:
                self._measure_copies(output, result, executed - scheduled)
            progress = scheduler.update(result)
            for group, sampled in progress:
                self._advance(group, sampled, result)
            updated = ended = self._clock()
            draft_seconds = 0.0
            if self._drafter is not None and self._draft(
                group for group, _ in progress if group.state is not GroupState.GONE
            ):
                ended = self._clock()
                draft_seconds = ended - updated
            sample = StepSample(
                num_sequences=len(output.scheduled),
                num_tokens=num_tokens,
                schedule_seconds=scheduled - started,
                execute_seconds=executed - scheduled,
                update_seconds=ended - executed - draft_seconds,
                draft_seconds=draft_seconds,
            )
            for hear_stepped in self._listeners.stepped:
                hear_stepped(scheduler, sample, started, ended)
            # Tokens from the prefix cache count, as they do in the cost of requests. Wrong drafts do not.
            tokens = num_tokens + stats.prefix_hit_tokens - hits - stats.rejected_draft_tokens + rejected
            self._measure(started, tokens, stats.generated_tokens > generated)
        elif scheduler.disk is not None and scheduler.has_work:
            scheduler.disk.wait()
        self._leaves_waiting = waiting.num_pressing > 0
        if not scheduler.has_work:
            self._last_step_end = None
            self._forget(scheduler.go_idle())
        return self._take_outputs()

    @property
    def next_end(self) -> float:
        """Time of the engine's clock before which no request has to end by its deadline or max_time."""
        return self._end_times.earliest

    def end_overdue(self) -> list[RequestOutput]:
        """End requests with a time that has passed, as a step does, without a forward pass.

        Return outputs, of calls before it, too. Live requests keep their blocks.
        """
        # Time without steps is no step's.
        self._last_step_end = None
        self._end_overdue(self._clock())
        if not self._scheduler.has_work:
            self._forget(self._scheduler.go_idle())
        return self._take_outputs()

    def pause_began(self) -> None:
        """Note that the caller takes no step until `pause_ended`."""
        self.stats.pauses += 1
        self._paused_until = math.inf

    def pause_ended(self) -> None:
        """Note that steps follow again."""
        self._paused_until = self._clock()

    def fail_all(self) -> list[RequestOutput]:
        """End every live request after `step` has raised; the engine is not used any more.

        Requests of that step end INTERNAL with STEP_FAILED, since one of them may be the cause. Others end with
        ENGINE_FAILED: UNAVAILABLE (safe to retry elsewhere) when they have no output so far, else INTERNAL.
        """
        in_step = {group for group, _ in self._scheduler.plan.entries}
        return self._end_all(lambda group: _broken(group, is_in_step=group in in_step))

    def stop_all(self) -> list[RequestOutput]:
        """End every live request, since the process stops; the engine is not used any more.

        Requests without any output so far end UNAVAILABLE (safe to retry elsewhere), others ABORTED with last_seq.
        """
        return self._end_all(lambda group: _stopping(group.report.next_seq))

    def _end_all(self, error: Callable[[SequenceGroup], PenstockError]) -> list[RequestOutput]:
        for group in self._groups.values():
            # The scheduler is left alone: it may be broken itself.
            group.report.finish(_finishes(group, FinishReason.ERROR), error(group))
            self._dirty[group] = None
        self.stats.requests_failed += len(self._groups)
        self.stats.requests_finished += len(self._groups)
        self._groups.clear()
        return self._take_outputs()

    def clear_cache(self) -> int:
        """Forget every prefix that no request holds, of both pools, and return the number of its blocks. The store of
        blocks forgets all."""
        if self._scheduler.disk is not None:
            self._scheduler.disk.clear()
        return self._clear_pools()

    def save_prefixes(self) -> int:
        """Write prefixes of both pools to the store of blocks, within --kv-disk-stop-seconds, and return their number.

        For the end of a process: no step follows.
        """
        disk, copies = self._scheduler.disk, self._scheduler.copies
        if disk is None:
            return 0
        deadline = self._clock() + self.config.kv_disk_stop_seconds

        def copy() -> None:
            listed = copies.listed()
            copies.clear()
            if listed:
                self._runner.execute(SchedulerOutput((), listed))

        return disk.save_all(self.device_blocks, copy, lambda: self._clock() < deadline)

    @property
    def device_blocks(self) -> BlockPool:
        """Accounting of the device's pool."""
        return self._scheduler.pool

    @property
    def prefix_log(self) -> PrefixLog | None:
        """Log of the prefixes that the pools keep, for readers on any thread; None: there is no prefix cache."""
        return self._scheduler.prefix_log

    def hear_blocks(self, cached: Callable[[Sequence, str, int, int], None], gone: Callable[[bytes], None]) -> None:
        """Let `cached` hear of a sequence, its salt, and the range of its blocks that are cached from now on in the
        device's pool, and `gone` the hashes of those that are not any more."""
        self._scheduler.tables.on_cached.append(cached)
        self.device_blocks.on_forget.append(gone)

    @property
    def host_blocks(self) -> BlockPool | None:
        """Accounting of the host pool; None: there is none."""
        return None if self._scheduler.host is None else self._scheduler.host.pool

    def copy_blocks(self, copies: Iterable[BlockCopy], device: Iterable[int] = (), host: Iterable[int] = ()) -> float:
        """Copy blocks between two steps, in order, and return the seconds. `BlockCommands` checks them before.

        The blocks `device` and `host` of the two pools are uncached; nobody holds them.
        """
        begun = self._clock()
        written = tuple(device), tuple(host)
        self.forget_prefixes(*written)
        # Sequences that are gone are left to the next step: it may still have to fork from them.
        output = SchedulerOutput((), tuple(copies))
        result = self._runner.execute(output)
        self._counter.copied(output, result)
        for hear in self._listeners.commanded:
            hear(*written, self.stats)
        return self._clock() - begun

    def forget_prefixes(self, device: Iterable[int], host: Iterable[int]) -> None:
        """Uncache blocks of the two pools that nobody holds."""
        for pool, blocks in ((self.device_blocks, device), (self.host_blocks, host)):
            for block in () if pool is None else blocks:
                assert pool is not None
                pool.forget_content(block)

    def reinitialise(self, runner: Runner, warm_up: Callable[[], None]) -> None:
        """Go on with another runner over the same pool; the pool's content is discarded.

        `warm_up` runs it once, while the pool is empty. Counters go on. Raises FailedPrecondition BUSY while a request
        is live or a caller holds blocks, and the errors of `warm_up`; the old runner then stays.
        """
        if self.has_work:
            raise FailedPrecondition("requests are live: drain first", reason="BUSY")
        if self.caller_blocks.device or self.caller_blocks.host:
            raise FailedPrecondition("a caller holds blocks of the pool: release them first", reason="BUSY")
        self._clear_pools()
        warm_up()
        self._forget_outputs()
        self._runner = runner
        self.weights_version += 1
        if self._scheduler.disk is not None:
            self._scheduler.disk.weights_changed()

    def weights_changed(self) -> int:
        """Count the weights as changed, between two steps, and return their version from now on.

        Running requests keep their blocks, and no request that begins later shares them. Nothing is kept that only
        earlier weights would have found.
        """
        self.weights_version += 1
        for group in self._groups.values():
            group.weights_changed(self.weights_version)
        if self._scheduler.disk is not None:
            self._scheduler.disk.weights_changed()
        self._clear_pools()
        self._forget_outputs()
        return self.weights_version

    def _clear_pools(self) -> int:
        for hear in self._listeners.cleared:
            hear()
        return self._scheduler.clear_cache()

    def _forget_outputs(self) -> None:
        """Forget earlier outputs that drafts are made of."""
        self._memory.clear()
        self._count_memory()

    def release_cache(self, request_ids: Iterable[str]) -> int:
        """Preempt live requests and uncache their computed blocks, unless another request uses them.

        They keep their tokens, wait at their old places and compute everything again. Returns the number of blocks that
        this frees. Raises NotFound for an id that is not live; then no request is preempted.
        """
        groups = []
        for place, request_id in enumerate(request_ids):
            group = self._groups.get(request_id)
            if group is None:
                field = f"live_request_ids[{place}]"
                raise NotFound(f"{field}: no live request has this id", reason="REQUEST_NOT_FOUND", field=field)
            groups.append(group)
        released = 0
        for group in dict.fromkeys(groups):
            held = group.state is GroupState.RUNNING or group.is_swapped
            released += self._scheduler.set_back(group)
            if held:
                for hear in self._listeners.set_back:
                    hear(group)
        return released

    def load(self) -> EngineLoad:
        """Return queue lengths and pool use. O(running requests)."""
        pool, waiting, running = self._scheduler.pool, self._scheduler.waiting, self._scheduler.running
        running_sequences, pending, now = 0, waiting.prompt_tokens, self._clock()
        for group in running:
            running_sequences += group.strategy.width
            pending += group.pending_prompt_tokens
        free, evictable = pool.num_free, pool.num_evictable
        # By position: it is made in every step.
        load = EngineLoad(
            len(waiting),
            len(running),
            running_sequences,
            waiting.num_idle_only,
            pool.num_blocks,
            free - evictable,
            pool.num_blocks - free,
            evictable,
            pool.used_by_group,
            pending,
            self.stats.steps,
            self._pace(running_sequences, now),
            now,
        )
        if self._scheduler.host is None:
            return load
        host, swapped = self._scheduler.host.pool, self._scheduler.host.num_groups
        return load._replace(
            host_blocks_total=host.num_blocks,
            host_blocks_free=host.num_free - host.num_evictable,
            host_blocks_used=host.num_used,
            host_blocks_evictable=host.num_evictable,
            swapped_requests=swapped,
        )

    def dump(self) -> EngineDump:
        """Return the engine's state without tokens and texts; see `dump_engine`."""
        return dump_engine(self.config, self.stats, self._scheduler, self._clock())

    def check_integrity(self) -> None:
        """Raise AssertionError when the pool's accounting and the sequences disagree. O(blocks), for tests."""
        self._scheduler.check_integrity()

    def _end_overdue(self, now: float) -> None:
        for group, error in self._end_times.too_late(now):
            self._cut_off(group, error)
        for group in self._end_times.over_max_time(now):
            try:
                emissions = group.strategy.end(FinishReason.MAX_TIME)
            except Exception as error:
                self._fail(group, error)
                continue
            self._emit(group, emissions)
            self._close(group)

    def _end_hopeless(self, now: float) -> None:
        """End requests at the queue's head that cannot end in time at the present speed, which may have fallen.

        They would otherwise take the places of requests that can end in time.
        """
        waiting, step_seconds = self._scheduler.waiting, self._meter.surest_step_seconds
        while (group := waiting.first()) is not None and self._end_times.is_hopeless(group, now, step_seconds):
            self._cut_off(group, wait_too_long())

    def _note_admitted(self, now: float) -> None:
        for group in self._scheduler.admitted:
            group.begun_at = now
            self._end_times.begin(group)
            if group.request.fair_share_key != IDLE_TENANT:
                self._meter.started(group.expected, group.request.arrival_time, now, was_paused=self._was_paused(group))

    def _advance(self, group: SequenceGroup, sampled: dict[Sequence, SampledToken], result: RunnerOutput) -> None:
        if result.failed and any(sequence.seq_id in result.failed for sequence in _drawers(group, sampled)):
            _log.error("the model gave no numbers", request_id=group.request.request_id)
            # Its keys and values may be no numbers either, from its prompt's first blocks on.
            self._scheduler.disown(group)
            self._cut_off(group, Internal("the model's output is not a number", reason="MODEL_OUTPUT_NAN"))
            return
        if result.exhausted and any(sequence.seq_id in result.exhausted for sequence in _drawers(group, sampled)):
            self._cut_off(group, no_token_left())
            return
        plugins = group.request.params.plugins
        if plugins is not None and plugins.error is not None:
            self._cut_off(group, plugins.error)
            return
        try:
            decision = group.strategy.advance(sampled)
        except Exception as error:
            self._fail(group, error)
            return
        if decision.drafts or decision.embedding is not None or decision.healed is not None:
            self._report(group, decision)
        self._emit(group, decision.emissions)
        for hear in self._listeners.advanced:
            hear(group, sampled, decision)
        self._scheduler.apply(group, decision)
        if group.state is GroupState.GONE:
            self._close(group)

    def _fail(self, group: SequenceGroup, error: Exception) -> None:
        """End a request with an error of its strategy. The others go on."""
        if not isinstance(error, PenstockError):
            _log.error("decoding strategy failed", request_id=group.request.request_id, exc_info=error)
            error = Internal("decoding failed", reason="DECODING_FAILED")
        # A PenstockError is the request's own fault, such as a constraint that outgrows its limits.
        self._cut_off(group, error)

    def _forget(self, seq_ids: tuple[int, ...]) -> None:
        """Release sequences when no step follows: runner and drafter would keep their state until the next one."""
        if seq_ids:
            self._runner.release(seq_ids)
            if self._drafter is not None:
                self._drafter.release(seq_ids)

    def _report(self, group: SequenceGroup, decision: Decision) -> None:
        report = group.report
        for _, accepted, rejected in decision.drafts or ():
            report.accepted_drafts += accepted
            report.rejected_drafts += rejected
        if decision.embedding is not None:
            report.embedding = decision.embedding
        if decision.healed is not None:
            report.healed = decision.healed

    def _count_memory(self) -> None:
        self.stats.memory = MemorySize(self._memory.num_tenants, self._memory.num_tokens)

    def _draft(self, groups: Iterable[SequenceGroup]) -> bool:
        """Run the draft model or head at once for all requests of the strategies that advanced in this step.

        There are no more drafts than rows in the next step. False: no strategy asked.
        """
        if self._drafter is None:
            return False
        asked = [(group, request) for group in groups for request in self._draft_requests(group)]
        if not asked:
            return False
        room = min(self.config.max_draft_rows, self.config.max_batch_tokens) - self._scheduler.num_running_sequences
        requests = share_room([request for _, request in asked], room)
        if not requests:
            return False
        owners = {request.sequence: group for group, request in asked}
        answers: dict[SequenceGroup, dict[Sequence, list[int]]] = {}
        for request, tokens in zip(requests, self._drafter.draft(requests), strict=True):
            answers.setdefault(owners[request.sequence], {})[request.sequence] = tokens
        for group, drafts in answers.items():
            try:
                group.strategy.take_drafts(drafts)
            except Exception as error:
                self._fail(group, error)
        return True

    def _draft_requests(self, group: SequenceGroup) -> list[DraftRequest]:
        try:
            return group.strategy.draft_requests()
        except Exception as error:
            self._fail(group, error)
            return []

    def _emit(self, group: SequenceGroup, emissions: list[Emission]) -> None:
        group.report.emit(emissions)
        self._dirty[group] = None

    def _cut_off(self, group: SequenceGroup, error: PenstockError | None) -> None:
        failed = error is not None and not isinstance(error, Cancelled)
        self._close(group, _finishes(group, FinishReason.ERROR if failed else FinishReason.ABORTED), error)

    def _close(
        self, group: SequenceGroup, unfinished: Iterable[SequenceFinish] = (), error: PenstockError | None = None
    ) -> None:
        """End a request, `unfinished` or with `error` before its time. No request ends in another way."""
        for hear in self._listeners.closed:
            hear(group, error)
        self._scheduler.remove(group)
        self._end_times.forget(group)
        cut = tuple(unfinished)
        group.report.finish(cut, error)
        if group.request.past_outputs is not None:
            self._count_memory()
        self._settle(group, is_whole=error is None and not cut)
        self._dirty[group] = None
        del self._groups[group.request.request_id]

    def _measure_copies(self, output: SchedulerOutput, result: RunnerOutput, seconds: float) -> None:
        """Tell the policy the cost of a step's rows, by its `seconds`, and of its copies to and from the host pool."""
        out_seconds, in_seconds = result.out_seconds, result.in_seconds
        self._scheduler.policy.stepped(output.num_tokens, seconds - out_seconds - in_seconds)
        if not output.copies:
            return
        num_out, num_in = num_swapped(output.copies)
        if num_out or num_in:
            self._scheduler.policy.copied(num_out, out_seconds, num_in, in_seconds)

    def _resting(self) -> frozenset[str]:
        """Tenants that rest in the next step. O(1) with one tenant."""
        waiting = self._scheduler.waiting
        if len(waiting.tenants) < 2:
            return frozenset()
        widths = self._scheduler.widths()
        if waiting.has_idle_only:
            # Beside any other request.
            del widths[IDLE_TENANT]
            return self.turns.choose(widths) | {IDLE_TENANT}
        return self.turns.choose(widths)

    def _measure(self, started: float, tokens: int, drew: bool) -> None:
        """Take a step's figures; its time begins at the end of the step before, while work goes on."""
        end, begin = self._clock(), started if self._last_step_end is None else self._last_step_end
        self._last_step_end = end
        scheduler = self._scheduler
        if scheduler.waiting.has_idle_only and IDLE_TENANT not in scheduler.resting:
            # It says nothing about the steps of others, which it rests in.
            if scheduler.waiting.has_callers:
                self._idle_rest.stepped(end - started, end)
                # The rest is no part of the next step.
                self._last_step_end = None
            return
        resting, waiting = scheduler.resting, scheduler.waiting.num_pressing > 0
        # No set is made for a step without such requests.
        is_light = bool(resting - {IDLE_TENANT} if scheduler.waiting.has_idle_only else resting)
        self._meter.stepped(end - begin, tokens, something_waited=waiting, drew=drew, is_light=is_light)
        self.turns.stepped(end - begin, self._meter.least_step_seconds, is_light=is_light)

    def _cost(self, request: Request, pace: Pace, demand: Demand) -> int:
        """Return the tokens that a request is expected to take. The replay of a trace returns the recorded ones."""
        return round(pace.tokens(demand))

    def _spent(self, group: SequenceGroup, generated: float) -> int:
        """Return the tokens that a request took, `generated` for each answer. The replay returns the recorded ones."""
        width = self._modes.most_sequences(group.request.params)
        return len(group.request.prompt_token_ids) + round(width * generated)

    def _settle(self, group: SequenceGroup, *, is_whole: bool) -> None:
        """Charge a tenant for its request's tokens, and learn the length of answers."""
        request = group.request
        generated = group.report.num_generated / request.params.num_return_sequences
        spent = self._spent(group, generated)
        self._scheduler.waiting.close(group, spent)
        for hear in self._listeners.charged:
            hear(group, spent)
        if request.fair_share_key == IDLE_TENANT:
            # It rests for any time, and others do not wait for it: no forecast learns from it.
            return
        self._meter.ended(
            group.expected,
            request.arrival_time,
            group.begun_at,
            self._clock(),
            generated,
            was_paused=self._was_paused(group),
        )
        if request.purpose is Purpose.GENERATE and group.report.scheduled_at is not None:
            self._meter.answered(generated, output_limit(self.config, request), is_whole=is_whole)

    def _was_paused(self, group: SequenceGroup) -> bool:
        """True for a request that was there in a pause: the time that it took says nothing about the pace."""
        return group.request.arrival_time < self._paused_until

    def _pace(self, running_sequences: int, now: float) -> Pace:
        waiting = self._scheduler.waiting
        # Requests that came since the last step wait only for the next one, if there are places.
        num_coming = 0 if self._leaves_waiting else waiting.num_pressing
        if waiting.has_idle_only:
            # They give way.
            running_sequences -= self._scheduler.num_sequences_of(IDLE_TENANT)
        free_places = max(self.config.max_running_sequences - running_sequences - num_coming, 0)
        is_idle = not self._scheduler.has_work or waiting.is_idle_alone
        return self._meter.pace(
            waiting.waiting_tokens, now, 0 if self._leaves_waiting else free_places, is_idle=is_idle
        )

    def _take_outputs(self) -> list[RequestOutput]:
        outputs = [group.report.take() for group in self._dirty]
        self._dirty.clear()
        return outputs


def _drawers(group: SequenceGroup, sampled: Mapping[Sequence, SampledToken]) -> Iterable[Sequence]:
    for sequence in group.sequences:
        yield sequence
        for index, verifier in sequence.verifiers:
            yield verifier
            token = sampled.get(verifier)
            if token is None or sequence.token_ids[index + 1 : index + 2] != [token.token_id]:
                break


def _finishes(group: SequenceGroup, reason: FinishReason) -> list[SequenceFinish]:
    return [end.finish for end in group.strategy.end(reason) if end.finish is not None]


def _broken(group: SequenceGroup, *, is_in_step: bool) -> PenstockError:
    if is_in_step:
        return Internal("a step of the engine with this request failed", reason="STEP_FAILED")
    kind = Internal if group.report.next_seq else Unavailable
    return kind("the engine failed", reason="ENGINE_FAILED")


def _stopping(next_seq: int) -> PenstockError:
    if next_seq == 0:
        return Unavailable("the server is stopping", reason="ENGINE_STOPPED")
    metadata = {"last_seq": str(next_seq - 1)}
    return Aborted("the server stopped before the end", reason="ENGINE_STOPPED", metadata=metadata)
