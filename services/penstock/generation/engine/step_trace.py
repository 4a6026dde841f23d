"""Record of every step: its schedule and its results, enough to replay the schedule without a model.

Numbers stand for everything that callers chose. Requests and sequences are counted. A full block of tokens becomes a
keyed hash of itself, of all blocks before it and of the request's cache salt. The key is made for the trace and stored
nowhere: equal blocks have equal hashes, and nobody can test a text against them. docs/learn/engine.md describes the
format.
"""

from __future__ import annotations

import functools
import secrets
from dataclasses import asdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from penstock import __version__
from penstock.generation.core.draw import DrawKind
from penstock.generation.engine.engine_listener import EngineListener
from penstock.generation.engine.group import GroupState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.common.errors import PenstockError
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import ScheduledSequence, SchedulerOutput
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.decoding.base import Decision
    from penstock.generation.engine.group import SequenceGroup
    from penstock.generation.engine.scheduler import Scheduler
    from penstock.generation.engine.stats import EngineStats, StepSample
    from penstock.generation.engine.trace_file import TraceFile

# Format 1 said `guide` and `is_guide` for `unconditional` and `is_unconditional`. Formats before 3 had no host pool.
FORMAT = 3
# 7 bytes: even in a large trace two different blocks are very unlikely to have equal numbers.
_HASH_BYTES = 7
Line = dict[str, Any]
P = ParamSpec("P")


def row_of(group: int, entry: ScheduledSequence) -> list[Any]:
    """Return [request, sequence, kind, first token, rows, blocks that the sequence holds].

    Kind p: prompt, or tokens that a preemption lost. v: verifies drafts. d: decodes.
    """
    sequence = entry.sequence
    kind = "v" if entry.verifiers else "d" if entry.num_tokens == 1 and not entry.num_prompt_rows else "p"
    return [group, sequence.seq_id, kind, entry.start, entry.num_tokens, len(sequence.block_table)]


def _ends_trace_on_error(
    record: Callable[Concatenate[StepTrace, P], None],
) -> Callable[Concatenate[StepTrace, P], None]:
    """Make an exception of `record` end the trace: the engine's step goes on."""

    @functools.wraps(record)
    def guarded(trace: StepTrace, /, *arguments: P.args, **options: P.kwargs) -> None:
        try:
            record(trace, *arguments, **options)
        except Exception as error:  # a listener's fault is none of the engine's
            trace.fail(error)

    return guarded


class StepTrace(EngineListener):
    """Listener that writes events to a file, and is silent after the file has ended."""

    def __init__(self, config: EngineConfig, file: TraceFile, now: float) -> None:
        """`now` is the engine's clock: times in the trace count from it."""
        self._file = file
        self._began = now
        self._block_size = config.block_size
        self._key = secrets.token_bytes(32)
        # seq_id -> hashes of its full blocks, and its number of tokens without drafts as last recorded.
        self._blocks: dict[int, list[int]] = {}
        self._tokens: dict[int, int] = {}
        self._widths: dict[int, int] = {}
        # Request -> its known sequences: the keys of the two above that belong to it.
        self._known: dict[int, set[int]] = {}
        # Tenants are counted, too. Costs of requests that ended since the last step.
        self._tenants: dict[str, int] = {}
        self._spent: list[list[int]] = []
        # Events since the last step, in order.
        self._events: list[Line] = []
        # The running step: its line, the token up to which it computes each sequence, and the groups that advanced.
        self._line: Line = {}
        self._ends: dict[int, int] = {}
        self._moved: dict[SequenceGroup, Line] = {}
        self._hits = self._evictions = 0
        self._copied = (0, 0, 0.0)
        file.write({"penstock_trace": FORMAT, "version": __version__, "config": asdict(config)})

    @_ends_trace_on_error
    def added(self, group: SequenceGroup) -> None:
        """Record that a request was accepted."""
        if not self._file.is_open:
            return
        request, params, number = group.request, group.request.params, _number(group)
        facts: Line = {
            "add": number,
            "at": request.arrival_time - self._began,
            "prompt": len(request.prompt_token_ids),
            "max_new_tokens": params.max_new_tokens,
            "n": params.num_return_sequences,
            "priority": request.priority,
            "purpose": request.purpose.name,
            "first_needed_row": request.first_needed_row,
            "prompt_logprobs": params.prompt_logprobs is not None,
            "lockstep": group.in_lockstep,
            "width": group.strategy.width,
            "cost": group.cost,
        }
        if request.fair_share_key:
            facts["tenant"] = self._tenant(request.fair_share_key)
        facts["mode"] = params.mode.trace
        if params.guidance.is_on:
            facts["guidance"] = len(params.guidance.negative_prompt_ids)
        self._widths[number] = group.strategy.width
        facts["sequences"] = [self._new(group, sequence) for sequence in group.sequences]
        self._events.append(facts)

    @_ends_trace_on_error
    def closed(self, group: SequenceGroup, error: PenstockError | None) -> None:
        """Record that a request ends: by itself when it has no sequence left, else it is cut off."""
        number = _number(group)
        self._widths.pop(number, None)
        self._forget(number, self._known.pop(number, ()))
        if not self._file.is_open or group.state is GroupState.GONE:
            return
        if self._line and group not in self._moved and any(row[0] == number for row in self._line["rows"]):
            self._line["outcomes"].append({"request": number, "cut": True})
        else:
            self._events.append({"cut": number})

    @_ends_trace_on_error
    def charged(self, group: SequenceGroup, tokens: int) -> None:
        """Record the cost of an ended request for its tenant."""
        if self._file.is_open:
            self._spent.append([_number(group), tokens])

    @_ends_trace_on_error
    def cleared(self) -> None:
        """Record that the prefix cache was cleared."""
        if self._file.is_open:
            self._events.append({"clear": True})

    @_ends_trace_on_error
    def commanded(self, device: Iterable[int], host: Iterable[int], stats: EngineStats) -> None:
        """Record that blocks of either pool were overwritten by somebody outside."""
        if self._file.is_open:
            self._events.append({"overwritten": [list(device), list(host)]})
            # These copies belong to no step.
            self._copies(stats)

    @_ends_trace_on_error
    def set_back(self, group: SequenceGroup) -> None:
        """Record that a running request was preempted between two steps, and its blocks forgotten."""
        if self._file.is_open:
            self._events.append({"set_back": self._restarted(group)})

    @_ends_trace_on_error
    def claimed(self, blocks: Iterable[int], host_blocks: Iterable[int]) -> None:
        """Record all blocks that callers hold from now on, of both pools."""
        if self._file.is_open:
            on_host = sorted(host_blocks)
            self._events.append({"claimed": sorted(blocks)} | ({"claimed_host": on_host} if on_host else {}))

    @_ends_trace_on_error
    def scheduled(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Record a step that is scheduled and not run yet."""
        if not self._file.is_open:
            return
        plan = scheduler.plan
        entries = plan.entries
        self._line = {
            "step": plan.number,
            "events": self._events,
            "rows": [row_of(_number(group), entry) for group, entry in entries],
            "held_back": plan.held_back.value,
            "admitted": [_number(group) for group in scheduler.admitted],
            "preempted": [self._restarted(group) for group in scheduler.preempted],
            "outcomes": [],
        }
        if scheduler.swapped:
            self._line["swapped"] = [_number(group) for group in scheduler.swapped]
        if scheduler.asked_to_rest:
            self._line["resting"] = sorted(self._tenant(tenant) for tenant in scheduler.asked_to_rest)
        self._events = []
        self._ends = {entry.sequence.seq_id: entry.start + entry.num_tokens for _, entry in entries}
        self._moved = {}

    @_ends_trace_on_error
    def advanced(self, group: SequenceGroup, drawers: Iterable[Sequence], decision: Decision) -> None:
        """Record the effect of a request's draws, before blocks are forked and freed."""
        if not self._line:
            return
        number, width = _number(group), group.strategy.width
        drawn = list(dict.fromkeys((one.origin or one).seq_id for one in drawers))
        states = [state for one in group.sequences if (state := self._change(group, one)) is not None]
        outcome: Line = {"request": number}
        if drawn != states:
            outcome["drawn"] = drawn
        if states:
            outcome["sequences"] = states
        if decision.forks:
            outcome["forks"] = [[parent.seq_id, self._new(group, child, parent)] for parent, child in decision.forks]
        if decision.added:
            outcome["added"] = [self._new(group, one) for one in decision.added]
        if decision.dropped:
            outcome["dropped"] = [one.seq_id for one in decision.dropped]
            self._forget(number, [one.seq_id for one in decision.dropped])
        if width != self._widths.get(number):
            outcome["width"] = self._widths[number] = width
        self._line["outcomes"].append(outcome)
        self._moved[group] = outcome

    def _tenant(self, key: str) -> int:
        """Return a tenant's number, from 1; 0 is the one without a key."""
        return self._tenants.setdefault(key, len(self._tenants) + 1) if key else 0

    @_ends_trace_on_error
    def stepped(self, scheduler: Scheduler, sample: StepSample, started: float, ended: float) -> None:
        """Record the end of the step, including drafts for the next one."""
        line, self._line = self._line, {}
        if not line:
            return
        for group, outcome in self._moved.items():
            drafts = [[one.seq_id, one.num_draft_tokens] for one in group.sequences if one.num_draft_tokens]
            if drafts:
                outcome["drafts"] = drafts
        # An idle engine must not keep ended groups in memory.
        self._moved = {}
        pool, stats = scheduler.pool, scheduler.stats
        if self._spent:
            line["spent"], self._spent = self._spent, []
        if scheduler.host is not None and (copies := self._copies(stats)):
            line["copied"] = copies
        self._file.write(
            {
                "step": line.pop("step"),
                "at": round(started - self._began, 6),
                "seconds": round(ended - started, 6),
                **line,
                "prefix_hits": stats.prefix_hit_tokens - self._hits,
                "evictions": pool.evictions - self._evictions,
                "pool": [pool.num_used, pool.num_free, pool.num_evictable],
            }
        )
        self._hits, self._evictions = stats.prefix_hit_tokens, pool.evictions

    def _copies(self, stats: EngineStats) -> list[float]:
        """Return blocks that the step copied to the host and from it, and the time; none: an empty list."""
        now = (stats.host_out_blocks, stats.host_in_blocks, stats.host_out_seconds + stats.host_in_seconds)
        before, self._copied = self._copied, now
        if now[:2] == before[:2]:
            return []
        return [now[0] - before[0], now[1] - before[1], round(now[2] - before[2], 6)]

    def fail(self, error: Exception) -> None:
        """End the trace because of `error`."""
        self._line = {}
        self._moved = {}
        self._file.fail(error)

    def _new(self, group: SequenceGroup, sequence: Sequence, parent: Sequence | None = None) -> Line:
        """Return all facts of a new sequence. For a fork only the blocks that differ from its parent's."""
        shared = 0
        if parent is not None:
            computed = min(parent.num_computed_tokens, sequence.num_tokens - 1)
            shared = min(computed // self._block_size, len(self._blocks[parent.seq_id]))
            self._blocks[sequence.seq_id] = self._blocks[parent.seq_id][:shared]
        self._hash(group, sequence)
        self._tokens[sequence.seq_id] = _num_fixed_tokens(sequence)
        self._known.setdefault(_number(group), set()).add(sequence.seq_id)
        facts: Line = {
            "sequence": sequence.seq_id,
            "tokens": _num_fixed_tokens(sequence),
            "prompt": sequence.num_prompt_tokens,
            "family": sequence.family,
            "shared": shared,
            "blocks": self._blocks[sequence.seq_id][shared:],
        }
        if sequence.draw.kind is DrawKind.UNCONDITIONAL:
            facts["is_unconditional"] = True
        if sequence.unconditional is not None:
            facts["unconditional"] = sequence.unconditional.seq_id
        if sequence.next_token_id is not None:
            facts["is_scored"] = True
        return facts

    def _change(self, group: SequenceGroup, sequence: Sequence) -> int | list[int] | None:
        """Return the change of a known sequence; None: no change. The number alone: one token more, filling no block.

        Else [number, tokens, computed or -1 where all that was scheduled is, hashes of blocks that are full now].
        """
        seq_id, tokens, before = sequence.seq_id, _num_fixed_tokens(sequence), self._tokens[sequence.seq_id]
        end = self._ends.get(seq_id)
        computed = -1 if end is None or end == sequence.num_computed_tokens else sequence.num_computed_tokens
        known = len(self._blocks[seq_id])
        if tokens == before and computed < 0:
            return None
        self._tokens[seq_id] = tokens
        if tokens // self._block_size == known and tokens == before + 1 and computed < 0:
            return seq_id
        self._hash(group, sequence)
        return [seq_id, tokens, computed, *self._blocks[seq_id][known:]]

    def _restarted(self, group: SequenceGroup) -> list[Any]:
        """Return [request, its sequences after the preemption], known ones by number. Forget those that it replaced."""
        number = _number(group)
        kept = {sequence.seq_id for sequence in group.sequences}
        self._forget(number, self._known.get(number, set()) - kept)
        sequences: list[Any] = []
        for sequence in group.sequences:
            is_known = sequence.seq_id in self._tokens
            sequences.append(sequence.seq_id if is_known else self._new(group, sequence))
        return [number, sequences]

    def _hash(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Hash its full blocks without drafts, as far as they are not hashed yet."""
        hashes = self._blocks.setdefault(sequence.seq_id, [])
        for index in range(len(hashes), _num_fixed_tokens(sequence) // self._block_size):
            before = hashes[-1].to_bytes(_HASH_BYTES) if hashes else self._keyed(group.request.block_salt.encode())
            hashes.append(int.from_bytes(self._keyed(before + sequence.block_content(index, self._block_size))))

    def _keyed(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=_HASH_BYTES, key=self._key).digest()

    def _forget(self, number: int, seq_ids: Iterable[int]) -> None:
        """Forget sequences of the request `number`."""
        for seq_id in seq_ids:
            self._blocks.pop(seq_id, None)
            self._tokens.pop(seq_id, None)
        known = self._known.get(number)
        if known is not None:
            known.difference_update(seq_ids)


def _number(group: SequenceGroup) -> int:
    """Return a request's place in the order of arrivals."""
    return group.key[1]


def _num_fixed_tokens(sequence: Sequence) -> int:
    """Return the number of tokens without drafts."""
    return sequence.num_tokens - sequence.num_draft_tokens
