"""Counters of the engine. Plain attributes, written on the engine thread, read on any thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from penstock.common.pace import Pace
from penstock.generation.core.step import DraftKind

_MAX_PENDING_STEPS = 4096


class StepSample(NamedTuple):
    """Sizes of one step, and the seconds of its parts; `execute` is the runner's."""

    num_sequences: int
    num_tokens: int
    schedule_seconds: float
    execute_seconds: float
    update_seconds: float
    # The draft model's; 0 when it had nothing to do.
    draft_seconds: float = 0.0


class MemorySize(NamedTuple):
    """Tenants with remembered outputs, and their tokens."""

    tenants: int = 0
    tokens: int = 0


@dataclass(slots=True)
class EngineStats:
    """Totals since the start, for counters, and the steps since the last `drain_steps`, for histograms."""

    steps: int = 0
    # Prompt tokens of accepted requests; rows of forward passes, recomputation included.
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    # Prompt tokens looked up in the prefix cache, and those found.
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    # Preemptions that copied blocks to the host pool; computed tokens that the others discarded.
    swaps: int = 0
    preempted_tokens: int = 0
    # Pauses of the steps that operators asked for.
    pauses: int = 0
    evictions: int = 0
    # Blocks that were copied to the host pool and from it, for swaps and for prefixes; the time that this took.
    host_out_blocks: int = 0
    host_in_blocks: int = 0
    host_out_seconds: float = 0.0
    host_in_seconds: float = 0.0
    # Tokens of prefix hits that came from the host pool; prefixes that it evicted.
    host_prefix_hit_tokens: int = 0
    host_evictions: int = 0
    # Prompt tokens that came from the file behind the host pool; blocks that it did not get, since too many waited.
    disk_hit_tokens: int = 0
    disk_dropped_blocks: int = 0
    copy_on_write_blocks: int = 0
    # Assisted generation: draft tokens that verification accepted and rejected.
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    # The same by their origin: accepted, refused.
    draft_tokens: dict[DraftKind, tuple[int, int]] = field(default_factory=lambda: dict.fromkeys(DraftKind, (0, 0)))
    # When the last request with drafts from memory ended.
    memory: MemorySize = field(default_factory=MemorySize)
    requests_finished: int = 0
    requests_failed: int = 0
    last_step: StepSample | None = None
    _pending: deque[StepSample] = field(default_factory=lambda: deque(maxlen=_MAX_PENDING_STEPS))

    def record(self, sample: StepSample) -> None:
        """Count one step. Without `drain_steps` the oldest samples are dropped."""
        self.steps += 1
        self.computed_tokens += sample.num_tokens
        self.last_step = sample
        self._pending.append(sample)

    def count_drafts(self, kind: DraftKind, accepted: int, rejected: int) -> None:
        """Count drafts that were verified."""
        self.accepted_draft_tokens += accepted
        self.rejected_draft_tokens += rejected
        before = self.draft_tokens[kind]
        self.draft_tokens[kind] = before[0] + accepted, before[1] + rejected

    def counters(self) -> dict[str, int]:
        """Return the totals by name."""
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        return {name: value for name, value in values if isinstance(value, int)}

    def drain_steps(self) -> list[StepSample]:
        """Return the steps since the last call, oldest first. Safe beside the engine thread, for one reader."""
        return [self._pending.popleft() for _ in range(len(self._pending))]


class EngineLoad(NamedTuple):
    """Load of the engine between two steps (penstock.v1.Load)."""

    waiting_requests: int = 0
    running_requests: int = 0
    running_sequences: int = 0
    # Of both, those that use idle capacity only.
    idle_only_requests: int = 0
    kv_blocks_total: int = 0
    # Neither used nor evictable.
    kv_blocks_free: int = 0
    kv_blocks_used: int = 0
    kv_blocks_evictable: int = 0
    # Used ones, of each group of layers.
    group_blocks_used: tuple[int, ...] = ()
    pending_prompt_tokens: int = 0
    step: int = 0
    # Speed, and the tokens that wait.
    pace: Pace = Pace()
    # Time of these figures on the engine's clock.
    measured_at: float = 0.0
    # The host pool; all 0: there is none.
    host_blocks_total: int = 0
    host_blocks_free: int = 0
    host_blocks_used: int = 0
    host_blocks_evictable: int = 0
    # Waiting requests with their blocks in the host pool.
    swapped_requests: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of the pool's blocks that is in use, 0 to 1."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0
