"""What the scheduler tells the runner to do in one step, and what comes back. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.generation.engine.request import PositionLogprobs
    from penstock.generation.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute tokens [start, start + num_tokens) of `sequence`.

    `sample` holds the sequences that draw a token from the last row's logits: none while a prompt is incomplete, the
    sequence itself in general, and all n siblings when the shared prompt of an n>1 request completes.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    sample: tuple[Sequence, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `copies` are (source, destination) blocks to copy before the forward pass (copy-on-write)."""

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[int, int], ...] = ()
    # seq_ids gone since the last step (finished, preempted, aborted): the runner forgets what it kept for them.
    released: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(entry.num_tokens for entry in self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token drawn for a sequence; `logprobs` when the request asked for them."""

    token_id: int
    # Natural log of its probability after the processors; None when nobody asked.
    logprob: float | None = None
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """Result of one step."""

    # seq_id -> token, for every sequence in some `sample`.
    sampled: dict[int, SampledToken]
    # seq_id -> logprobs of the prompt tokens whose predecessor was computed in this step, in order.
    prompt_logprobs: dict[int, tuple[PositionLogprobs, ...]]
    # seq_ids of some `sample` that have no token, since the model's output for them is not a number.
    failed: frozenset[int] = frozenset()


class Runner(Protocol):
    """What the engine needs of a model runner."""

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Run one step. Mutates only the KV pool and the runner's own buffers. Raises on a broken device."""
        ...
