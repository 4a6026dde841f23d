"""One step as the scheduler hands it to the runner, and the runner's results. Plain data: no torch.

Objects made for every token are not frozen, here, in request.py and in decoding/: a frozen dataclass takes five times
as long to make. Still, no code changes one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.adapter import Adapter
    from penstock.generation.core.draw import Candidates
    from penstock.generation.core.request import PositionLogprobs
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.tensors import StepTensors


@dataclass(slots=True)
class ScheduledSequence:
    """Order to compute tokens [start, start + num_tokens) of `sequence`.

    `sample` holds the sequences that draw from the last row's logits: none while a prompt is incomplete, usually the
    sequence itself, and all n siblings when the shared prompt of an n > 1 request is complete. `verifiers` are (row,
    verifier) of a sequence with drafts: the verifier draws from that row, counted from 0 within this entry.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    sample: tuple[Sequence, ...] = ()
    verifiers: tuple[tuple[int, Sequence], ...] = ()

    @property
    def num_prompt_rows(self) -> int:
        """Number of rows that belong to the prompt."""
        return max(min(self.start + self.num_tokens, self.sequence.num_prompt_tokens) - self.start, 0)


class Fork(NamedTuple):
    """A sequence `child` that began as a copy of `parent` with `num_tokens` computed tokens."""

    parent: int
    child: int
    num_tokens: int


class StateCopy(NamedTuple):
    """Copy of the state of a sequence after its first `num_tokens` tokens, from or to a place of the snapshots."""

    seq_id: int
    place: int
    num_tokens: int


class Bundles(Protocol):
    """Blocks of bundles, by the first of each: a list or a dict."""

    def __getitem__(self, block: int, /) -> Seq[int]:
        """Return the blocks of the bundle that begins with `block`."""


class CopyKind(enum.IntEnum):
    """Pools that a block is copied from and to. SwapBlocks has the same numbers."""

    # From the host pool to the device's.
    IN = 0
    # From the device's pool to the host's.
    OUT = 1
    # Within the device's pool (copy-on-write).
    WITHIN = 2


class BlockCopy(NamedTuple):
    """Copy of one block, in all layers."""

    source: int
    destination: int
    kind: CopyKind = CopyKind.WITHIN


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `copies` are carried out in order, before the forward pass."""

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    # Forks since the last step, in order. They are carried out before releases: a parent may be released as well.
    forks: tuple[Fork, ...] = ()
    # Sequences that ended or were preempted since the last step: the runner forgets its data for them.
    released: tuple[int, ...] = ()
    # False: no prompt in the step has embeddings of its own.
    has_embeds: bool = False
    # Adapter of each entry; None: no entry has one.
    adapters: tuple[Adapter | None, ...] | None = None
    # Sequences with their blocks in the host pool: the runner forgets the old blocks and keeps everything else.
    parked: tuple[int, ...] = ()
    # Models with states: sequences that begin with a snapshot, restored after releases, and snapshots to take after the
    # step.
    restored: tuple[StateCopy, ...] = ()
    saved: tuple[StateCopy, ...] = ()
    # Blocks of each bundle in the tables, by the first of them; None: every bundle is one block.
    bundles: Bundles | None = None

    @property
    def num_tokens(self) -> int:
        """Number of rows of the forward pass."""
        return sum([entry.num_tokens for entry in self.scheduled])


@dataclass(slots=True)
class SampledToken:
    """Result of a sequence's draw; `logprobs` is set when the request asked for them."""

    # -1 where no token is drawn (DrawKind other than TOKEN).
    token_id: int
    # Natural log of its probability after the processors; None: not asked for.
    logprob: float | None = None
    logprobs: PositionLogprobs | None = None
    # DrawKind.CANDIDATES.
    candidates: Candidates | None = None
    # DrawSpec.similarity.
    similarity: float | None = None
    # DrawKind.EMBEDDING: (hidden size), fp32, little-endian.
    embedding: bytes | None = None
    # Tensors of this position that SamplingParams.tensors asks for.
    tensors: StepTensors | None = None


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """Result of one step."""

    # seq_id -> its draw, for every sequence in a `sample` or `verifiers`, except unconditional branches.
    sampled: dict[int, SampledToken]
    # seq_id -> logprobs of prompt tokens, in order; this step computed the tokens before them.
    prompt_logprobs: dict[int, tuple[PositionLogprobs, ...]]
    # Sequences of a `sample` without a token, because the model's output for them is not a number.
    failed: frozenset[int] = frozenset()
    # Sequences without a token, because the request's own options leave none to draw.
    exhausted: frozenset[int] = frozenset()
    # Time that copies to the host pool, and from it, took.
    out_seconds: float = 0.0
    in_seconds: float = 0.0


class Runner(Protocol):
    """Interface of a model runner to the engine."""

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Run one step; a step without sequences only copies blocks.

        It changes only the KV pools and the runner's own buffers. Raises when the device is broken.
        """
        ...

    def release(self, seq_ids: Seq[int]) -> None:
        """Forget sequences when no step follows that could release them; unknown ids are fine."""
        ...


class DraftKind(enum.Enum):
    """Origin of drafts, as metrics name it."""

    PROMPT_LOOKUP = "prompt_lookup"
    NGRAM_MEMORY = "ngram_memory"
    LOOKAHEAD = "lookahead"
    DRAFT_MODEL = "draft_model"
    DRAFT_HEAD = "draft_head"


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Order to propose at most `num_tokens` tokens that follow `sequence.token_ids`."""

    sequence: Sequence
    num_tokens: int
    # Drafting stops at a token with less than this probability; 0: never.
    confidence_threshold: float = 0.0


class Drafter(Protocol):
    """Interface of a draft model. The engine calls it between two steps, for all requests of a step at once."""

    @property
    def kind(self) -> DraftKind:
        """Origin of its drafts."""
        ...

    def draft(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        """Return draft tokens for each request, empty without room or a proposal. Never fails a request."""
        ...

    def release(self, seq_ids: Seq[int]) -> None:
        """Forget sequences; unknown ids are fine."""
        ...
