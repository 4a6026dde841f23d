"""A request and what the engine says about it. Plain data: no torch, no proto."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.common.errors import PenstockError
    from penstock.generation.core.grammar import Grammar
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.tensors import StepTensors


class FinishReason(enum.Enum):
    """Why a sequence ended (penstock.v1.FinishReason)."""

    STOP_EOS = 1
    STOP_STRING = 2
    STOP_TOKEN = 3
    LENGTH = 4
    MAX_TIME = 5
    CONSTRAINT_DONE = 6
    TOOL_CALLS = 7
    ABORTED = 8
    ERROR = 9


class Purpose(enum.Enum):
    """What a request is for."""

    GENERATE = 1
    # Log-probabilities of its prompt's tokens from `first_needed_row` + 1 on.
    SCORE = 2
    # The mean of the final hidden states of its prompt.
    EMBED = 3


@dataclass(frozen=True, slots=True)
class TokenHealingOptions:
    """Token healing: what the prompt's last token may become."""

    # Those that begin with its text; itself is one.
    token_ids: frozenset[int]
    # What such an id's text has beyond that of the prompt's last token.
    added_text: Callable[[int], str]


@dataclass(slots=True)
class Request:
    """One request as the engine sees it: validated, ids only, defaults resolved. Times are time.monotonic()."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    # Already emitted by an earlier attempt, per returned sequence; empty or one list per sequence.
    resumed_token_ids: list[list[int]] = field(default_factory=list)
    cache_salt: str = ""
    priority: int = 0
    # time.monotonic() after which nothing more is computed; None: no deadline.
    deadline: float | None = None
    attempt_epoch: int = 0
    warnings: tuple[str, ...] = ()
    purpose: Purpose = Purpose.GENERATE
    # Structured output: compiled; every returned sequence has a state of it.
    grammar: Grammar | None = None
    # Token healing, where the prompt's last token has another to become; at least two prompt tokens then.
    token_healing: TokenHealingOptions | None = None
    # First token whose row somebody wants to see (its hidden state, its logits): a cached prefix may be reused up to
    # here. None: only the last row matters.
    first_needed_row: int | None = None

    def __post_init__(self) -> None:
        if self.params.mode.first_needed_row is not None:
            self.first_needed_row = self.params.mode.first_needed_row


@dataclass(slots=True)
class Logprob:
    """One token at one position; natural log after the processors; rank 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


@dataclass(slots=True)
class PositionLogprobs:
    """The token at a position (None for the first prompt token) and the most likely ones."""

    chosen: Logprob | None
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceFinish:
    """How a returned sequence ended."""

    index: int
    reason: FinishReason
    num_tokens: int
    stop_token_id: int | None = None
    stop_string: str | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class StartedOutput:
    """The request was scheduled and its prompt is computed; sent just before the first delta."""

    cached_tokens: int
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    # Token healing: what the prompt's last token became, and its text beyond that of the token it was.
    healed: tuple[int, str] | None = None


@dataclass(slots=True)
class Emission:
    """New ids of one returned sequence: made by a strategy, numbered by the report, and delivered as it is."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: SequenceFinish | None = None
    # One entry per token, or none at all.
    tensors: tuple[StepTensors | None, ...] = ()
    # Gapless from 0 over the request.
    seq: int = 0


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds per stage; a stage that did not run is None."""

    queue: float | None
    prefill: float | None
    decode: float | None
    time_to_first_token: float | None
    total: float


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """Last word on a request: exactly one of these per accepted request, always."""

    sequences: tuple[SequenceFinish, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings: RequestTimings
    last_seq: int | None
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    # Purpose.EMBED: (hidden size) fp32, little-endian.
    embedding: bytes | None = None
    # Set when the request failed: the stream ends with this status.
    error: PenstockError | None = None


@dataclass(slots=True)
class RequestOutput:
    """Everything one engine step produced for one request, in order: started, deltas, finished."""

    request: Request
    started: StartedOutput | None
    deltas: tuple[Emission, ...]
    finished: FinishedOutput | None


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What came of one item: the logprobs of Score, or an embedding in `finished`."""

    logprobs: tuple[PositionLogprobs, ...]
    finished: FinishedOutput
