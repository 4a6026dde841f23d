"""All live sequences of one request: the unit that is admitted, preempted and ended."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.generation.engine.expected_time import ExpectedTime

if TYPE_CHECKING:
    from penstock.generation.core.request import Request
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.engine.decoding.base import DecodingStrategy
    from penstock.generation.engine.request_report import RequestReport


class GroupState(enum.Enum):
    """State of a group in the scheduler."""

    WAITING = 1
    RUNNING = 2
    GONE = 3


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request in the engine.

    The sequences of a family begin with the same prompt. Until a family is forked only its leader is computed, exactly
    up to the end of the prompt. There every other sequence of the family forks from the leader. A family of one is
    always forked. Preemption takes a group back to this start, even if its sequences have generated tokens, so that
    they share the prompt's blocks again.

    With guidance, and with beams that decide together what they may draw, the sequences go in lockstep: no last row is
    computed until all last rows can be, so that a step which draws has the rows of all sequences.
    """

    request: Request
    strategy: DecodingStrategy
    report: RequestReport
    # Scheduling order, lowest first; unique and fixed for life.
    key: tuple[float, int]
    # Live sequences. Changed only by the scheduler.
    sequences: list[Sequence]
    # Tokens expected at its arrival, prompt included: its tenant is charged for them.
    cost: int = 0
    # Expected time at its arrival.
    expected: ExpectedTime = field(default_factory=ExpectedTime)
    # When its first step began; None: it had none.
    begun_at: float | None = None
    state: GroupState = GroupState.WAITING
    # Swapped group: sequence -> its blocks in the host pool; empty: it is not swapped. Changed only by HostPool.
    host_tables: dict[Sequence, tuple[list[int], ...]] = field(default_factory=dict)
    # True once the store of blocks was asked for its prompt's. Changed only by DiskTier.
    is_store_asked: bool = False
    # The request's, kept here: it is read for each of the sequences in every step.
    block_salt: str = field(init=False)
    # Families with followers that still wait for their leader.
    _unforked: set[int] = field(init=False)
    _in_lockstep: bool = field(init=False)

    def __post_init__(self) -> None:
        self.block_salt = self.request.block_salt
        self.start_over()

    def restart(self) -> None:
        """Go back to the start after a preemption: nothing is computed."""
        replaced = self.strategy.restarted()
        if replaced is not None:
            self.sequences = replaced
        self.start_over()

    def weights_changed(self, version: int) -> None:
        """Begin on new weights, unless it has begun: what is computed stays, and what comes next is found by none but
        requests that began as it did."""
        if self.report.scheduled_at is not None:
            return
        self.request.weights_version = version
        self.block_salt = self.request.block_salt
        for sequence in self.sequences:
            # A search for its prefix may have hashed its tokens.
            sequence.block_hashes.clear()

    def start_over(self) -> None:
        """Make families wait for their leaders again.

        The leader is a shortest sequence, so one that draws at the prompt's end is always the leader itself.
        """
        self.sequences.sort(key=lambda sequence: len(sequence.token_ids))
        sizes = Counter(sequence.family for sequence in self.sequences)
        self._unforked = {family for family, size in sizes.items() if size > 1}
        params = self.request.params
        is_constrained = params.limits_tokens or self.request.grammar is not None
        self._in_lockstep = len(sizes) > 1 or (params.mode.shares_constraint and is_constrained)

    @property
    def leaders(self) -> list[Sequence]:
        """The first sequence of each family."""
        first: dict[int, Sequence] = {}
        for sequence in self.sequences:
            first.setdefault(sequence.family, sequence)
        return list(first.values())

    @property
    def is_swapped(self) -> bool:
        """True while its computed blocks are in the host pool."""
        return bool(self.host_tables)

    @property
    def is_forked(self) -> bool:
        """True when no sequence waits for a leader."""
        return not self._unforked

    @property
    def computable(self) -> list[Sequence]:
        """Sequences with tokens that may be scheduled."""
        if not self._unforked:
            return self.sequences
        leaders = self.leaders
        return [one for one in self.sequences if one.family not in self._unforked or one in leaders]

    def fork_followers(self, leader: Sequence) -> list[Sequence]:
        """Return the sequences that fork from `leader` once its prompt is computed; none a second time."""
        if leader.family not in self._unforked or leader.num_computed_tokens != leader.num_prompt_tokens:
            return []
        self._unforked.discard(leader.family)
        return [one for one in self.sequences if one.family == leader.family and one is not leader]

    @property
    def in_lockstep(self) -> bool:
        """True when no last row is computed before all of them can be."""
        return self._in_lockstep

    @property
    def all_ready(self) -> bool:
        """True when every sequence may be computed to its end. O(sequences) in lockstep, else O(1)."""
        return not self._in_lockstep or all(one.num_computed_tokens >= self.end(one) - 1 for one in self.computable)

    def target(self, sequence: Sequence, *, all_ready: bool) -> int:
        """Return the token up to which `sequence` may be computed now, given the group's `all_ready`."""
        end = sequence.num_prompt_tokens if sequence.family in self._unforked else len(sequence.token_ids)
        return end if all_ready or sequence.num_computed_tokens >= end else end - 1

    def drawing(self, sequence: Sequence, end: int) -> tuple[Sequence, ...]:
        """Return the sequences that draw when `sequence` is computed up to `end`: those with no token after it."""
        if sequence.num_draft_tokens:
            return ()
        if sequence.family not in self._unforked:
            return (sequence,) if end == len(sequence.token_ids) else ()
        if end < sequence.num_prompt_tokens:
            return ()
        return tuple(one for one in self.sequences if one.family == sequence.family and len(one.token_ids) == end)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that its sequences hold; shared ones count once."""
        if len(self.sequences) == 1:
            return self.sequences[0].num_held_blocks
        widths = {
            block: table.width for sequence in self.sequences for table in sequence.tables for block in table.held
        }
        return sum(widths.values())

    @property
    def pending_prompt_tokens(self) -> int:
        """Number of prompt tokens that are not computed yet."""
        if len(self.sequences) == 1:
            (leader,) = self.sequences
            return max(leader.num_prompt_tokens - leader.num_computed_tokens, 0)
        return sum(max(leader.num_prompt_tokens - leader.num_computed_tokens, 0) for leader in self.leaders)

    def end(self, sequence: Sequence) -> int:
        """Return the token up to which `sequence` is computed: its prompt's end while followers wait for it there."""
        return sequence.num_prompt_tokens if sequence.family in self._unforked else len(sequence.token_ids)
