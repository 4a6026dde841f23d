"""Record of every step: its schedule and its results, enough to replay the schedule without a model.

Numbers stand for everything that callers chose. Requests and sequences are counted. A full block of tokens becomes a
keyed hash of itself, of all before it and of the request's cache salt. The key is made for the trace and kept nowhere:
equal blocks show as equal, and no text can be tried against them. docs/learn/engine.md describes the format.
"""

from __future__ import annotations

import secrets
from array import array
from dataclasses import asdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.generation.core.draw import DrawKind
from penstock.generation.engine.group import GroupState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import ScheduledSequence, SchedulerOutput
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.decoding.base import Decision
    from penstock.generation.engine.group import SequenceGroup
    from penstock.generation.engine.scheduler import Scheduler
    from penstock.generation.engine.stats import EngineStats
    from penstock.generation.engine.trace_file import TraceFile

FORMAT = 1
# 7 bytes: in a trace of any size no two different blocks are to be expected with equal numbers.
_HASH_BYTES = 7
Line = dict[str, Any]


def row_of(group: int, entry: ScheduledSequence) -> list[Any]:
    """Return [request, sequence, kind, first token, rows, blocks that the sequence holds].

    Kind p: prompt, or tokens that a preemption lost. v: verifies drafts. d: decodes.
    """
    sequence = entry.sequence
    kind = "v" if entry.probes else "d" if entry.num_tokens == 1 and not entry.num_prompt_rows else "p"
    return [group, sequence.seq_id, kind, entry.start, entry.num_tokens, len(sequence.block_table)]


class StepTrace:
    """Observer of the engine, on its thread. It changes nothing there, and is silent once the file has ended."""

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
        # Events since the last step, in order.
        self._events: list[Line] = []
        # The running step: its line, the token up to which it computes each sequence, and the groups that advanced.
        self._line: Line = {}
        self._ends: dict[int, int] = {}
        self._moved: dict[SequenceGroup, Line] = {}
        self._hits = self._evictions = 0
        file.write({"penstock_trace": FORMAT, "version": __version__, "config": asdict(config)})

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
        }
        facts["mode"] = params.mode.trace
        if params.guidance.is_on:
            facts["guidance"] = len(params.guidance.negative_prompt_ids)
        self._widths[number] = group.strategy.width
        facts["sequences"] = [self._new(group, sequence) for sequence in group.sequences]
        self._events.append(facts)

    def closed(self, group: SequenceGroup) -> None:
        """Record that a request ends: by itself when it has no sequence left, else it is cut off."""
        number = _number(group)
        self._widths.pop(number, None)
        for sequence in group.sequences:
            self._forget(sequence)
        if not self._file.is_open or group.state is GroupState.GONE:
            return
        if self._line and group not in self._moved and any(row[0] == number for row in self._line["rows"]):
            self._line["outcomes"].append({"request": number, "cut": True})
        else:
            self._events.append({"cut": number})

    def cleared(self) -> None:
        """Record that the prefix cache was cleared."""
        if self._file.is_open:
            self._events.append({"clear": True})

    def scheduled(self, output: SchedulerOutput, scheduler: Scheduler) -> None:
        """Record a step that is put together and not run yet."""
        if not self._file.is_open:
            return
        entries = list(zip(scheduler.plan.groups, output.scheduled, strict=True))
        self._line = {
            "events": self._events,
            "rows": [row_of(_number(group), entry) for group, entry in entries],
            "held_back": scheduler.plan.held_back.value,
            "admitted": [_number(group) for group in scheduler.admitted],
            "preempted": [self._restarted(group) for group in scheduler.preempted],
            "outcomes": [],
        }
        self._events = []
        self._ends = {entry.sequence.seq_id: entry.start + entry.num_tokens for _, entry in entries}
        self._moved = {}

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
            for one in decision.dropped:
                self._forget(one)
        if width != self._widths.get(number):
            outcome["width"] = self._widths[number] = width
        self._line["outcomes"].append(outcome)
        self._moved[group] = outcome

    def stepped(self, scheduler: Scheduler, stats: EngineStats, started: float, ended: float) -> None:
        """Record the end of the step, including drafts for the next one."""
        line, self._line = self._line, {}
        if not line:
            return
        for group, outcome in self._moved.items():
            drafts = [[one.seq_id, one.num_draft_tokens] for one in group.sequences if one.num_draft_tokens]
            if drafts:
                outcome["drafts"] = drafts
        pool = scheduler.pool
        self._file.write(
            {
                "step": stats.steps,
                "at": round(started - self._began, 6),
                "seconds": round(ended - started, 6),
                **line,
                "prefix_hits": stats.prefix_hit_tokens - self._hits,
                "evictions": pool.evictions - self._evictions,
                "pool": [pool.num_used, pool.num_free, pool.num_evictable],
            }
        )
        self._hits, self._evictions = stats.prefix_hit_tokens, pool.evictions

    def _new(self, group: SequenceGroup, sequence: Sequence, parent: Sequence | None = None) -> Line:
        """Return all facts of a new sequence. Of a fork's blocks only those that differ from its parent's."""
        shared = 0
        if parent is not None:
            computed = min(parent.num_computed_tokens, sequence.num_tokens - 1)
            shared = min(computed // self._block_size, len(self._blocks[parent.seq_id]))
            self._blocks[sequence.seq_id] = self._blocks[parent.seq_id][:shared]
        self._hash(group, sequence)
        self._tokens[sequence.seq_id] = _settled(sequence)
        facts: Line = {
            "sequence": sequence.seq_id,
            "tokens": _settled(sequence),
            "prompt": sequence.num_prompt_tokens,
            "family": sequence.family,
            "shared": shared,
            "blocks": self._blocks[sequence.seq_id][shared:],
        }
        if sequence.draw.kind is DrawKind.UNCONDITIONAL:
            facts["is_guide"] = True
        if sequence.unconditional is not None:
            facts["guide"] = sequence.unconditional.seq_id
        if sequence.next_token_id is not None:
            facts["is_scored"] = True
        return facts

    def _change(self, group: SequenceGroup, sequence: Sequence) -> int | list[int] | None:
        """Return the change of a known sequence; None: no change. The number alone: one token more, filling no block.

        Else [number, tokens, computed or -1 where all that was scheduled is, hashes of blocks that are full now].
        """
        seq_id, tokens, before = sequence.seq_id, _settled(sequence), self._tokens[sequence.seq_id]
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
        """Return [request, its sequences after the preemption], known ones by number."""
        sequences: list[Any] = []
        for sequence in group.sequences:
            is_known = sequence.seq_id in self._tokens
            sequences.append(sequence.seq_id if is_known else self._new(group, sequence))
        return [_number(group), sequences]

    def _hash(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Hash its full blocks without drafts, as far as they are not hashed yet."""
        hashes = self._blocks.setdefault(sequence.seq_id, [])
        for index in range(len(hashes), _settled(sequence) // self._block_size):
            first = index * self._block_size
            before = hashes[-1].to_bytes(_HASH_BYTES) if hashes else self._keyed(group.request.cache_salt.encode())
            block = array("I", sequence.token_ids[first : first + self._block_size]).tobytes()
            hashes.append(int.from_bytes(self._keyed(before + block)))

    def _keyed(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=_HASH_BYTES, key=self._key).digest()

    def _forget(self, sequence: Sequence) -> None:
        self._blocks.pop(sequence.seq_id, None)
        self._tokens.pop(sequence.seq_id, None)


def _number(group: SequenceGroup) -> int:
    """Return a request's place in the order of arrivals."""
    return group.key[1]


def _settled(sequence: Sequence) -> int:
    """Return the number of tokens without drafts."""
    return sequence.num_tokens - sequence.num_draft_tokens
