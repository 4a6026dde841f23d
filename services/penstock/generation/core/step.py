"""What the scheduler tells the runner to do in one step, and what comes back. Plain data: no torch.

What is made for every token is not frozen, here, in request.py and in decoding/: a frozen object takes five times as
long to make. Nobody changes one all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.draw import Candidates
    from penstock.generation.core.request import PositionLogprobs
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.tensors import StepTensors


@dataclass(slots=True)
class ScheduledSequence:
    """Compute tokens [start, start + num_tokens) of `sequence`.

    `sample` holds the sequences that draw from the last row's logits: none while a prompt is incomplete, the sequence
    itself in general, and all n siblings when the shared prompt of an n>1 request completes. `probes` are (row, probe)
    of a sequence with drafts: the probe draws from that row, counted from 0 within this entry.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    sample: tuple[Sequence, ...] = ()
    probes: tuple[tuple[int, Sequence], ...] = ()

    @property
    def num_prompt_rows(self) -> int:
        """Rows that are of the prompt."""
        return max(min(self.start + self.num_tokens, self.sequence.num_prompt_tokens) - self.start, 0)


class Fork(NamedTuple):
    """`child` began as a copy of `parent`, whose first `num_tokens` tokens were computed: for what a runner keeps."""

    parent: int
    child: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `copies` are (source, destination) blocks to copy before the forward pass (copy-on-write)."""

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[int, int], ...] = ()
    # Since the last step, in order. Forks come before what is released: a parent may be gone.
    forks: tuple[Fork, ...] = ()
    # seq_ids gone since the last step (finished, preempted, aborted): the runner forgets what it kept for them.
    released: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(entry.num_tokens for entry in self.scheduled)


@dataclass(slots=True)
class SampledToken:
    """What a sequence's draw brought; `logprobs` when the request asked for them."""

    # -1 where no token is drawn (DrawKind other than TOKEN).
    token_id: int
    # Natural log of its probability after the processors; None when nobody asked.
    logprob: float | None = None
    logprobs: PositionLogprobs | None = None
    # DrawKind.CANDIDATES.
    candidates: Candidates | None = None
    # DrawSpec.similarity.
    similarity: float | None = None
    # DrawKind.EMBEDDING: (hidden size) fp32, little-endian.
    embedding: bytes | None = None
    # What SamplingParams.tensors asks of this position.
    tensors: StepTensors | None = None


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """Result of one step."""

    # seq_id -> what was drawn, for every sequence in some `sample` or `probes` but guides.
    sampled: dict[int, SampledToken]
    # seq_id -> logprobs of the prompt tokens whose predecessor was computed in this step, in order.
    prompt_logprobs: dict[int, tuple[PositionLogprobs, ...]]
    # seq_ids of some `sample` that have no token, since the model's output for them is not a number.
    failed: frozenset[int] = frozenset()
    # seq_ids that have none since the request's own options leave no token to draw.
    exhausted: frozenset[int] = frozenset()


class Runner(Protocol):
    """What the engine needs of a model runner."""

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Run one step. Mutates only the KV pool and the runner's own buffers. Raises on a broken device."""
        ...

    def release(self, seq_ids: Seq[int]) -> None:
        """Forget sequences, when no step follows that could say so; ids that it never saw are fine."""
        ...


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Propose at most `num_tokens` tokens that go on after `sequence.token_ids`."""

    sequence: Sequence
    num_tokens: int
    # Stop at a token with less than this probability; 0: never.
    confidence_threshold: float = 0.0


class Drafter(Protocol):
    """A draft model. Called by the engine between two steps; all requests of a step at once."""

    def draft(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        """Draft tokens of each request; empty where there is no room or nothing to say. Never fails a request."""
        ...

    def release(self, seq_ids: Seq[int]) -> None:
        """Forget sequences; ids that it never saw are fine."""
        ...
