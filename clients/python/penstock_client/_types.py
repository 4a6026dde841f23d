"""Results of calls: plain dataclasses, so that user code does not handle protos (they stay reachable as `.proto`)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import TYPE_CHECKING, Any

from penstock.common.units import format_duration
from penstock.v1 import common_pb2, generation_pb2

from penstock_client._tensors import StepTensors, score_of


def _own_fields(kind: type[Any]) -> list[str]:
    """Names of the fields that come from the message's fields of the same names."""
    return [each.name for each in fields(kind) if each.name != "proto"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. `str()` is a line for people."""

    prompt_tokens: int
    completion_tokens: int
    # Prompt tokens with KV from the prefix cache.
    cached_tokens: int
    # Completion tokens inside <think>...</think>.
    reasoning_tokens: int
    accepted_draft_tokens: int
    rejected_draft_tokens: int
    proto: common_pb2.Usage = field(repr=False, compare=False)

    @staticmethod
    def of(proto: common_pb2.Usage) -> Usage:
        """Make it from the message."""
        return Usage(
            proto.prompt_tokens,
            proto.completion_tokens,
            proto.cached_tokens,
            proto.reasoning_tokens,
            proto.accepted_draft_tokens,
            proto.rejected_draft_tokens,
            proto,
        )

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    def __str__(self) -> str:
        parts = [f"{self.prompt_tokens} prompt tokens", f"{self.completion_tokens} completion tokens"]
        if self.cached_tokens:
            parts[0] += f" ({self.cached_tokens} cached)"
        if self.reasoning_tokens:
            parts[1] += f" ({self.reasoning_tokens} of reasoning)"
        if drafted := self.accepted_draft_tokens + self.rejected_draft_tokens:
            parts.append(f"{self.accepted_draft_tokens} of {drafted} drafts accepted")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent in each stage of a request; None for a stage that did not run. `str()` is a line for people."""

    template_seconds: float | None
    tokenize_seconds: float | None
    # Choosing a backend and waiting for admission at the router.
    route_seconds: float | None
    # Waiting in the generation service.
    queue_seconds: float | None
    # First scheduled to first sampled token.
    prefill_seconds: float | None
    # First to last sampled token.
    decode_seconds: float | None
    detokenize_seconds: float | None
    time_to_first_token_seconds: float | None
    total_seconds: float | None
    proto: common_pb2.StageTimings = field(repr=False, compare=False)

    @staticmethod
    def of(proto: common_pb2.StageTimings) -> Timings:
        """Make it from the message."""
        ran = {name: getattr(proto, name) if proto.HasField(name) else None for name in _own_fields(Timings)}  # type: ignore[arg-type]
        return Timings(**ran, proto=proto)

    def __str__(self) -> str:
        ran = {name: getattr(self, name) for name in _own_fields(Timings)}
        return ", ".join(
            f"{name.removesuffix('_seconds').replace('_', ' ')} {format_duration(seconds)}"
            for name, seconds in ran.items()
            if seconds is not None
        )


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One position: the token, its natural-log probability and rank (1 = most likely), and the most likely ones."""

    token_id: int
    text: str
    logprob: float
    rank: int
    top: tuple[LogprobEntry, ...] = ()
    # The token's bytes if they are parts of characters, which `text` shows as U+FFFD; else empty.
    raw: bytes = b""

    @property
    def token_bytes(self) -> bytes:
        """The token's bytes; those of all tokens, joined, are the answer's text as UTF-8."""
        return self.raw or self.text.encode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A piece of a function call (in a Delta) or a complete one (in a Choice); `arguments` is JSON text."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of returned sequence `index`; `seq` is gapless from 0 over the stream."""

    seq: int
    index: int
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[LogprobEntry, ...] = ()
    # One per token when an output_* option asks for them.
    tensors: tuple[StepTensors, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """A continuation after its prompt: the sum of its tokens' natural-log probabilities, and each of them.

    `is_greedy`: every token was the most likely one.
    """

    logprob: float
    is_greedy: bool
    tokens: tuple[LogprobEntry, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """Result of `score`: a Score per item, in order."""

    scores: tuple[Score, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Result of `embed`: a vector per text, in order."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class WatermarkEvidence:
    """Result of `detect_watermark`; the first six fields and `confidence` are transformers'."""

    num_tokens_scored: int
    num_green_tokens: int
    green_fraction: float
    # Standard deviations between the number of green tokens and its mean in text without the watermark.
    z_score: float
    # Probability of at least this number of green tokens without the watermark (one-sided).
    p_value: float
    # z_score is above the threshold.
    prediction: bool
    # The tested ids. Those at `green_positions` are green; those before `first_scored_position` are context.
    token_ids: tuple[int, ...]
    green_positions: tuple[int, ...]
    first_scored_position: int

    @property
    def confidence(self) -> float:
        """1 - p_value."""
        return 1.0 - self.p_value


@dataclass(slots=True)
class Choice:
    """One returned sequence, collected. `finish_reason` is the enum's name without prefix, e.g. "STOP_EOS"."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    tensors: list[StepTensors] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None
    # Sum of the tokens' log-probabilities when they were asked for; the beam score in the beam modes.
    cumulative_logprob: float | None = None

    @property
    def beam_indices(self) -> list[int]:
        """Beam that each token was drawn from, as transformers' beam_indices; empty without tensors of a beam mode."""
        return [one.beam_index for one in self.tensors if one.beam_index is not None]

    def transition_scores(self, *, normalize_logits: bool = False) -> list[float]:
        """Return the score of each token, as transformers' compute_transition_scores: with output_scores=True.

        `normalize_logits`: the log-probability among all tokens, if scores are not log-probabilities. Raises ValueError
        if a token's score was not asked for.
        """
        if len(self.tensors) != len(self.token_ids):
            raise ValueError("option 'output_scores': the answer does not have each token's score, set it to true")
        return [
            score_of(tensors, token_id, normalize=normalize_logits)
            for tensors, token_id in zip(self.tensors, self.token_ids, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request: its sequences in order of index, and the server's first and last event."""

    choices: tuple[Choice, ...]
    started: generation_pb2.Started
    finished: generation_pb2.Finished

    if not TYPE_CHECKING:
        # What a stream has: `generate` returned one once.

        def __getattr__(self, name: str) -> Any:
            if name in ("result", "read", "run", "close"):
                raise AttributeError(f"{name}: generate() returns the whole answer, stream() a stream of it")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def __iter__(self) -> Any:
            raise TypeError("this is the whole answer: stream() yields its deltas")

    def best(self, count: int) -> Completion:
        """Return the answer with its `count` best choices by mean log-probability, best first, renumbered.

        Choices without log-probabilities, which must be asked for, come last.
        """

        def mean(choice: Choice) -> float:
            total = choice.cumulative_logprob
            return -inf if total is None else total / max(1, len(choice.token_ids))

        ranked = sorted(self.choices, key=mean, reverse=True)[:count]
        return replace(self, choices=tuple(replace(one, index=place) for place, one in enumerate(ranked)))

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.choices[0].text if self.choices else ""

    @property
    def token_ids(self) -> list[int]:
        """Ids of the first sequence, if the answer carries ids."""
        return self.choices[0].token_ids if self.choices else []

    @property
    def finish_reason(self) -> str | None:
        """Reason why the first sequence ended."""
        return self.choices[0].finish_reason if self.choices else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems of the request that transformers only warns about."""
        return tuple(self.started.warnings)

    @property
    def usage(self) -> Usage:
        """Token counts."""
        return Usage.of(self.finished.usage)

    @property
    def timings(self) -> Timings:
        """Seconds spent in each stage."""
        return Timings.of(self.finished.timings)
