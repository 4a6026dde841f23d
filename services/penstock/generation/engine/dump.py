"""The engine's state as plain data, for finding faults: sizes and states, never a token or a text.

A dump changes nothing and runs no step. It is bounded: past a limit it gives only the number of groups and sequences.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from penstock.generation.engine.group import GroupState

if TYPE_CHECKING:
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import ScheduledSequence
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.fairness.fair_queue import FairQueue
    from penstock.generation.engine.group import SequenceGroup
    from penstock.generation.engine.group_queue import GroupQueue
    from penstock.generation.engine.scheduler import Scheduler
    from penstock.generation.engine.stats import EngineStats
    from penstock.generation.engine.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class SequenceDump:
    """One sequence; lengths in tokens, drafts included."""

    number: int
    # Number of the returned sequence.
    index: int
    family: int
    tokens: int
    prompt_tokens: int
    computed_tokens: int
    blocks: int
    # Of a swapped request.
    host_blocks: int
    draft_tokens: int
    # admission: its request is queued. leader: another sequence of its family computes the prompt. others: other
    # sequences of its request are behind, and it has drawn or may not be computed to its end yet. step: it waits only
    # for the next step.
    waits_for: str


@dataclass(frozen=True, slots=True)
class GroupDump:
    """One request. `request` is `request_key` of its id."""

    request: str
    # waiting, running or gone.
    state: str
    decoding: str
    priority: int
    # Seconds since its arrival, and since its first step (0: none yet).
    age_seconds: float
    running_seconds: float
    prompt_tokens: int
    max_new_tokens: int
    # Most sequences that it will have at once.
    width: int
    sequences: tuple[SequenceDump, ...]
    # Number of sequences that are left out.
    more_sequences: int


@dataclass(frozen=True, slots=True)
class PoolDump:
    """The KV pool, in blocks. `free` blocks hold no reusable prefix."""

    total: int
    used: int
    free: int
    evictable: int
    # Blocks that admission leaves free.
    reserve: int
    # Holders of used blocks, each counted: more than `used` where blocks are shared.
    references: int


@dataclass(frozen=True, slots=True)
class HostPoolDump:
    """The host pool, in blocks, and the way to preempt; all 0: there is no host pool."""

    total: int = 0
    # Blocks of swapped requests.
    used: int = 0
    free: int = 0
    # Prefixes that no swapped request holds.
    evictable: int = 0
    swapped_requests: int = 0
    preemption: str = ""


@dataclass(frozen=True, slots=True)
class RowsDump:
    """Rows that one request computed in a step: of prompts, of drafts, and of decoding."""

    request: str
    sequences: int
    prompt_rows: int
    decode_rows: int
    draft_rows: int


@dataclass(frozen=True, slots=True)
class StepDump:
    """The step scheduled last: a running one, one that hangs, or after a failure the step that broke.

    Empty when all work is done.
    """

    # From 1; 0: no step.
    number: int
    rows: int
    rows_left: int
    # Reason why it is not larger; see `HeldBack`.
    ended_by: str
    groups: tuple[RowsDump, ...]
    more_groups: int
    admitted: int
    preempted: int


@dataclass(frozen=True, slots=True)
class EngineDump:
    """State of the engine. `stack`: of its thread, innermost last, set when the state was read from another thread."""

    config: dict[str, float]
    counters: dict[str, int]
    pool: PoolDump
    last_step: StepDump
    running: tuple[GroupDump, ...]
    more_running: int
    waiting: tuple[GroupDump, ...]
    more_waiting: int
    stack: tuple[str, ...] = ()
    host_pool: HostPoolDump = HostPoolDump()

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers, for logs and messages."""
        return asdict(self)


def request_key(request_id: str) -> str:
    """Return a stand-in for a request's id, since callers choose the id: the first 12 hex digits of its SHA-256."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:12]


def dump_engine(config: EngineConfig, stats: EngineStats, scheduler: Scheduler, now: float) -> EngineDump:
    """Return the state between two steps, or after a step that broke. O(blocks).

    Queues and the plan are copied before they are read, so that another thread may call this. It gets RuntimeError,
    KeyError or IndexError when the engine changes them meanwhile.
    """
    pool, running, waiting = scheduler.pool, scheduler.running, scheduler.waiting
    return EngineDump(
        config={name: value for name, value in asdict(config).items() if isinstance(value, int | float)},
        counters=stats.counters(),
        pool=PoolDump(
            total=pool.num_blocks,
            used=pool.num_used,
            free=pool.num_free - pool.num_evictable,
            evictable=pool.num_evictable,
            reserve=config.reserve_blocks,
            references=pool.num_references,
        ),
        last_step=_step(config, scheduler),
        running=_groups(config, running, now),
        more_running=max(len(running) - config.dump_groups, 0),
        waiting=_groups(config, waiting, now),
        more_waiting=max(len(waiting) - config.dump_groups, 0),
        host_pool=_host_pool(config, scheduler),
    )


def _host_pool(config: EngineConfig, scheduler: Scheduler) -> HostPoolDump:
    if scheduler.host is None:
        return HostPoolDump()
    pool = scheduler.host.pool
    return HostPoolDump(
        total=pool.num_blocks,
        used=pool.num_used,
        free=pool.num_free - pool.num_evictable,
        evictable=pool.num_evictable,
        swapped_requests=scheduler.host.num_groups,
        preemption=config.preemption,
    )


def _groups(config: EngineConfig, queue: GroupQueue | FairQueue, now: float) -> tuple[GroupDump, ...]:
    return tuple(_group(config, group, now) for group in tuple(islice(queue, config.dump_groups)))


def _group(config: EngineConfig, group: SequenceGroup, now: float) -> GroupDump:
    request, scheduled_at, sequences = group.request, group.report.scheduled_at, tuple(group.sequences)
    computable = {sequence.seq_id for sequence in group.computable}
    all_ready = group.all_ready

    def waits_for(sequence: Sequence) -> str:
        if group.state is GroupState.WAITING:
            return "admission"
        if sequence.seq_id not in computable:
            return "leader"
        return "step" if sequence.num_computed_tokens < group.target(sequence, all_ready=all_ready) else "others"

    return GroupDump(
        request=request_key(request.request_id),
        state=group.state.name.lower(),
        decoding=type(group.strategy).__name__,
        priority=request.priority,
        age_seconds=round(now - request.arrival_time, 6),
        running_seconds=0.0 if scheduled_at is None else round(now - scheduled_at, 6),
        prompt_tokens=len(request.prompt_token_ids),
        max_new_tokens=request.params.max_new_tokens,
        width=group.strategy.width,
        sequences=tuple(
            SequenceDump(
                number=sequence.seq_id,
                index=sequence.index,
                family=sequence.family,
                tokens=sequence.num_tokens,
                prompt_tokens=sequence.num_prompt_tokens,
                computed_tokens=sequence.num_computed_tokens,
                blocks=sequence.num_held_blocks,
                host_blocks=_num_host_blocks(group, sequence),
                draft_tokens=sequence.num_draft_tokens,
                waits_for=waits_for(sequence),
            )
            for sequence in sequences[: config.dump_sequences]
        ),
        more_sequences=max(len(sequences) - config.dump_sequences, 0),
    )


def _step(config: EngineConfig, scheduler: Scheduler) -> StepDump:
    plan: StepPlan = scheduler.plan
    planned = plan.entries
    entries: dict[SequenceGroup, list[ScheduledSequence]] = {}
    for group, entry in planned:
        entries.setdefault(group, []).append(entry)
    return StepDump(
        number=plan.number,
        rows=sum(entry.num_tokens for _, entry in planned),
        rows_left=plan.budget,
        ended_by=plan.held_back.value,
        groups=tuple(_rows(group, own) for group, own in islice(entries.items(), config.dump_groups)),
        more_groups=max(len(entries) - config.dump_groups, 0),
        admitted=len(scheduler.admitted),
        preempted=len(scheduler.preempted) + len(scheduler.swapped),
    )


def _rows(group: SequenceGroup, entries: list[ScheduledSequence]) -> RowsDump:
    prompt_rows = sum(entry.num_prompt_rows for entry in entries)
    draft_rows = sum(max(len(entry.verifiers) - 1, 0) for entry in entries)
    return RowsDump(
        request=request_key(group.request.request_id),
        sequences=len(entries),
        prompt_rows=prompt_rows,
        decode_rows=sum(entry.num_tokens for entry in entries) - prompt_rows - draft_rows,
        draft_rows=draft_rows,
    )


def _num_host_blocks(group: SequenceGroup, sequence: Sequence) -> int:
    tables = group.host_tables.get(sequence, ())
    return sum(own.width * len(table) for table, own in zip(tables, sequence.tables, strict=False))
