"""What a decoding mode is: an object that turns drawn tokens into sequences that go on, fork or end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.generation.engine.request import FinishReason, PositionLogprobs, SequenceFinish
    from penstock.generation.engine.sequence import Sequence
    from penstock.generation.engine.step import SampledToken


@dataclass(frozen=True, slots=True)
class Emission:
    """Something the caller is told about returned sequence `index`; the engine numbers it."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: SequenceFinish | None = None


@dataclass(slots=True)
class Decision:
    """What follows from one step. The engine carries out forks, then drops.

    forks: (parent, child). The child is a new Sequence that holds the parent's tokens as far as they are computed,
    and then its own; it shares the parent's blocks copy-on-write, so nothing is computed twice.
    dropped: sequences that end here or are given up: their blocks are freed.
    """

    emissions: list[Emission] = field(default_factory=list)
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    dropped: list[Sequence] = field(default_factory=list)


class DecodingStrategy(ABC):
    """One per request, living on the engine thread; knows nothing of blocks, budgets or other requests.

    The strategy appends tokens to its sequences' `token_ids`; the scheduler computes every token that is appended,
    and a token is drawn for a sequence when none is left. A sequence whose draw is known but that the strategy does
    not extend yet (beams wait for each other) is simply not scheduled. All sequences begin with the same prompt.
    """

    @property
    @abstractmethod
    def width(self) -> int:
        """Most sequences alive at once from now on."""

    @abstractmethod
    def start(self) -> tuple[list[Sequence], list[Emission]]:
        """The first live sequences, and what is already settled (a resumed sequence that had ended)."""

    @abstractmethod
    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        """Tokens drawn in a step, by the sequence they are for. Called only when there are some."""

    @abstractmethod
    def end(self, reason: FinishReason) -> list[Emission]:
        """The request ends now from outside: the last emission of every returned sequence that has not ended."""
