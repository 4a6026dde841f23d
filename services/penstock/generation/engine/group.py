"""All live sequences of one request: the unit that is admitted, preempted and ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.generation.engine.decoding.base import DecodingStrategy
    from penstock.generation.engine.report import RequestReport
    from penstock.generation.engine.request import Request
    from penstock.generation.engine.sequence import Sequence


class GroupState(enum.Enum):
    """Where a group stands with the scheduler."""

    WAITING = 1
    RUNNING = 2
    GONE = 3


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request in the engine.

    Until `forked`, only the leader is computed, and exactly up to the end of the prompt; there every other sequence
    forks from it. A group of one is always forked. Preemption takes a group back to this start, whatever its
    sequences have generated meanwhile, so the prompt's blocks are shared again after it.
    """

    request: Request
    strategy: DecodingStrategy
    report: RequestReport
    # Scheduling order, lowest first; unique and fixed for life.
    key: tuple[float, int]
    # Live sequences. Changed only by the scheduler.
    sequences: list[Sequence]
    state: GroupState = GroupState.WAITING
    forked: bool = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Back to the start: nothing computed. The leader is a shortest sequence, so one that draws at the prompt's
        end is always the leader itself."""
        self.sequences.sort(key=lambda sequence: len(sequence.token_ids))
        self.forked = len(self.sequences) <= 1

    @property
    def computable(self) -> list[Sequence]:
        """Sequences that may be given tokens to compute."""
        return self.sequences if self.forked else self.sequences[:1]

    @property
    def followers(self) -> list[Sequence]:
        """Sequences that wait for the leader to reach the end of the prompt."""
        return [] if self.forked else self.sequences[1:]

    def target(self, sequence: Sequence) -> int:
        """How far `sequence` may be computed now."""
        return len(sequence.token_ids) if self.forked else sequence.num_prompt_tokens

    def drawing(self, sequence: Sequence, end: int) -> tuple[Sequence, ...]:
        """Who draws a token from the last row when `sequence` is computed up to `end`: those with nothing after it."""
        if self.forked:
            return (sequence,) if end == len(sequence.token_ids) else ()
        if end < sequence.num_prompt_tokens:
            return ()
        return tuple(sibling for sibling in self.sequences if len(sibling.token_ids) == end)

    @property
    def pending_prompt_tokens(self) -> int:
        """Prompt tokens not computed yet."""
        if not self.sequences:
            return 0
        leader = self.sequences[0]
        return max(leader.num_prompt_tokens - leader.num_computed_tokens, 0)
