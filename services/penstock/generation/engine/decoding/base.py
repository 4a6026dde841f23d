"""Contracts of a decoding mode: a strategy, which turns drawn tokens into sequences that go on, fork or end; a spec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.common.errors import InvalidArgument

if TYPE_CHECKING:
    from penstock.generation.core.modes import DecodingMode
    from penstock.generation.core.request import Emission, FinishReason, Request
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import DraftRequest, SampledToken
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.stopping import StopCriteria


def no_token_left() -> InvalidArgument:
    """What a request ends with whose options have taken every token away."""
    what = "leaves no token to draw here: what one of its options allows, others forbid"
    return InvalidArgument("config", what, reason="NO_TOKEN_LEFT")


@dataclass(slots=True)
class Decision:
    """What follows from one step. The engine carries out forks, then drops.

    forks: (parent, child). The child is a new Sequence that begins with the parent's tokens as far as they are computed
    and then has its own, or holds only the first of them; it shares the parent's blocks copy-on-write, so nothing is
    computed twice, but the last token of a child that has none of its own.
    dropped: sequences that end here or are given up: their blocks are freed.
    """

    emissions: list[Emission] = field(default_factory=list)
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    dropped: list[Sequence] = field(default_factory=list)
    # Draft tokens that were verified in this step.
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    embedding: bytes | None = None
    # New sequences with nothing computed, beside those of `forks`: the request stands as at its start then, and each
    # family's leader, which may be forked here, is computed to the end of the prompt before others fork from it.
    added: list[Sequence] = field(default_factory=list)
    # Token healing: what the prompt's last token is, and its text beyond that of the token that was sent.
    healed: tuple[int, str] | None = None


class DecodingStrategy(ABC):
    """One per request, living on the engine thread; knows nothing of blocks, budgets or other requests.

    The strategy appends tokens to its sequences; the scheduler computes every token that is appended, and the sequence
    draws, as its `draw` says, when none is left. A sequence whose draw is known but that the strategy does not extend
    yet (beams wait for each other) is simply not scheduled. All sequences of a family begin with the same prompt.
    """

    @property
    @abstractmethod
    def width(self) -> int:
        """Most sequences alive at once from now on."""

    @abstractmethod
    def start(self) -> tuple[list[Sequence], list[Emission]]:
        """The first live sequences, and what is known already (a resumed sequence that had ended)."""

    @abstractmethod
    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        """Tokens drawn in a step, by the sequence they are for. Called only when there are some."""

    def restarted(self) -> list[Sequence] | None:
        """The request was preempted: nothing of it is computed any more. The live sequences to go on with, when they
        are others than before (fewer: what they share beyond the prompt would be computed once for each)."""
        return None

    def draft_requests(self) -> list[DraftRequest]:
        """What the draft model shall propose before the next step; asked after every `advance`."""
        return []

    def take_drafts(self, drafts: Mapping[Sequence, list[int]]) -> None:  # noqa: B027 (most have no drafts)
        """The answers to `draft_requests`, by sequence; only the strategy that asked is called."""

    @abstractmethod
    def end(self, reason: FinishReason) -> list[Emission]:
        """The request ends now from outside: the last emission of every returned sequence that has not ended."""


@dataclass(frozen=True, slots=True)
class ModeSpec:
    """A decoding mode, as the registry in modes.py has it. Every mode's file ends with its own."""

    # Its options and facts: requests whose `params.mode` is of this type are of this mode.
    options: type[DecodingMode]
    # Decodes a request. The last argument gives ids for new sequences.
    strategy: Callable[[Request, StopCriteria, Callable[[], int]], DecodingStrategy]
    # Most sequences of a request that are alive at once.
    most_sequences: Callable[[SamplingParams], int]
    # (sizes, options, prompt tokens, output tokens) -> most KV blocks that a request can ever hold.
    blocks_needed: Callable[[EngineConfig, SamplingParams, int, int], int]
    # Option that is to blame for a request with more sequences than run at once.
    width_option: str = "num_return_sequences"
