"""Contracts of a decoding mode: a spec, and a strategy that lets sequences go on, fork or end by their drawn tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from penstock.common.errors import InvalidArgument

if TYPE_CHECKING:
    from penstock.generation.core.decoding_mode import DecodingMode
    from penstock.generation.core.request import Emission, FinishReason, Request
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import DraftKind, DraftRequest, SampledToken
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.stopping import StopCriteria


def no_token_left() -> InvalidArgument:
    """Return the error for options that leave no token to draw."""
    description = "leaves no token to draw here: some options forbid every token that others allow"
    return InvalidArgument("config", description, reason="NO_TOKEN_LEFT")


class VerifiedDrafts(NamedTuple):
    """Drafts of one sequence that a step verified: all, or as many as it had room for."""

    kind: DraftKind
    accepted: int
    rejected: int


@dataclass(slots=True)
class Decision:
    """Decision of a strategy after one step. The engine carries out forks, then drops.

    forks: (parent, child). The child is a new Sequence. It begins with the parent's computed tokens and goes on with
    its own, or holds only the first of the parent's. It shares the parent's blocks copy-on-write, so nothing is
    computed twice, except the last token of a child without tokens of its own.
    dropped: sequences that end here or are abandoned. Their blocks are freed.
    """

    emissions: list[Emission] = field(default_factory=list)
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    dropped: list[Sequence] = field(default_factory=list)
    # Drafts that were verified in this step; None: there were none.
    drafts: list[VerifiedDrafts] | None = None
    embedding: bytes | None = None
    # New sequences without computed tokens, in addition to those of `forks`. The request is then as at its start: each
    # family's leader, which may be a fork, is computed to the end of the prompt before others fork from it.
    added: list[Sequence] = field(default_factory=list)
    # Token healing: the prompt's new last token, and its text beyond the text of the token in the request.
    healed: tuple[int, str] | None = None

    def note_drafts(self, drafts: VerifiedDrafts) -> None:
        """Add a sequence's drafts that were verified."""
        if self.drafts is None:
            self.drafts = []
        self.drafts.append(drafts)


class DecodingStrategy(ABC):
    """Strategy of one request, on the engine thread. It knows nothing of blocks, budgets or other requests.

    The strategy appends tokens to its sequences, the scheduler computes every appended token, and a sequence draws, as
    its `draw` says, when none is left to compute. A sequence that has drawn and is not extended yet (beams wait for
    each other) is not scheduled. All sequences of a family begin with the same prompt.
    """

    @property
    @abstractmethod
    def width(self) -> int:
        """Most sequences alive at once from now on."""

    @abstractmethod
    def start(self) -> tuple[list[Sequence], list[Emission]]:
        """Return the first live sequences, and known events (a resumed sequence had ended)."""

    @abstractmethod
    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        """Take the tokens drawn in a step, by sequence, at least one, and decide what follows."""

    def restarted(self) -> list[Sequence] | None:
        """Go on after a preemption: the request has no computed tokens any more.

        Return the live sequences if they differ from those before, else None. Fewer are better: tokens that they share
        beyond the prompt would be computed once for each.
        """
        return None

    def draft_requests(self) -> list[DraftRequest]:
        """Return orders for the draft model before the next step. Called after every `advance`."""
        return []

    def take_drafts(self, drafts: Mapping[Sequence, list[int]]) -> None:  # noqa: B027 (most have no drafts)
        """Take the answers to `draft_requests`, by sequence. Called only on a strategy that asked."""

    @abstractmethod
    def end(self, reason: FinishReason) -> list[Emission]:
        """End the request from outside. Return the last emission of every returned sequence that has not ended."""


@dataclass(frozen=True, slots=True)
class ModeSpec:
    """Specification of a decoding mode for the registry in mode_registry.py. A mode's file ends with it."""

    # Type of its options and facts. A request is of this mode when its `params.mode` is of this type.
    options: type[DecodingMode]
    # Makes the strategy of a request. The last argument gives ids for new sequences.
    strategy: Callable[[Request, StopCriteria, Callable[[], int]], DecodingStrategy]
    # Most sequences of a request alive at once.
    most_sequences: Callable[[SamplingParams], int]
    # (sizes, options, prompt tokens, output tokens) -> most KV blocks that a request can ever hold.
    blocks_needed: Callable[[EngineConfig, SamplingParams, int, int], int]
    # Option that an error names when a request has more sequences than run at once.
    width_option: str = "num_return_sequences"
