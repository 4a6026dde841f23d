"""A request, and the engine's reports on it. Plain data: no torch, no proto."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.common.block_hashes import routing_salt

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from penstock.common.errors import PenstockError
    from penstock.common.tracing import Span
    from penstock.generation.core.adapter import Adapter
    from penstock.generation.core.grammar import Grammar
    from penstock.generation.core.prompt_embeds import PromptEmbeds
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.tensors import StepTensors
    from penstock.text.thoughts import Thought


class FinishReason(enum.Enum):
    """Reason why a sequence ended (penstock.v1.FinishReason)."""

    STOP_EOS = 1
    STOP_STRING = 2
    STOP_TOKEN = 3
    LENGTH = 4
    MAX_TIME = 5
    CONSTRAINT_DONE = 6
    TOOL_CALLS = 7
    ABORTED = 8
    ERROR = 9
    STOP_CRITERIA = 10


class Purpose(enum.Enum):
    """Purpose of a request."""

    GENERATE = 1
    # Log-probabilities of its prompt's tokens from `first_needed_row` + 1 on.
    SCORE = 2
    # The mean of the final hidden states of its prompt.
    EMBED = 3


@dataclass(frozen=True, slots=True)
class TokenHealingOptions:
    """Token healing: tokens that the prompt's last token may become."""

    # Tokens that begin with its text, itself included.
    token_ids: frozenset[int]
    # Text of such a token beyond the text of the prompt's last token.
    added_text: Callable[[int], str]


class PastOutputs(Protocol):
    """Past outputs of one tenant, where requests look for likely continuations."""

    def add(self, token_ids: Seq[int]) -> None:
        """Remember a run of tokens; the oldest ones are dropped."""
        ...

    def continuation(self, token_ids: Seq[int], *, fewest: int, max_tokens: int) -> list[int]:
        """Return the tokens that last followed the end of `token_ids`; empty: its `fewest` last tokens are unknown."""
        ...


class VerificationCosts(Protocol):
    """Costs of drafts, in steps without them."""

    @property
    def is_known(self) -> bool:
        """True when a step like the last one was measured without drafts."""
        ...

    def measure(self) -> None:
        """Measure steps from now on."""
        ...

    def of(self, num_drafts: int) -> float:
        """Return how much longer a step takes with this number of drafts, over its time without."""
        ...

    def of_drafting(self, num_drafts: int) -> float:
        """Return the same of drafting them, before they are verified."""
        ...

    def retries(self) -> bool:
        """True now and then, where drafts are too dear whatever they are: one is to be made, to measure it again."""
        ...


@dataclass(slots=True)
class Request:
    """One request as the engine sees it: validated, ids only, defaults resolved. Times are time.monotonic()."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    # Ids that an earlier attempt emitted: one list per returned sequence, or empty.
    resumed_token_ids: list[list[int]] = field(default_factory=list)
    cache_salt: str = ""
    # Identifies the tenant in the order of waiting requests; empty: all callers are one tenant. Never logged.
    fair_share_key: str = ""
    priority: int = 0
    # time.monotonic() after which nothing more is computed; None: no deadline.
    deadline: float | None = None
    attempt_epoch: int = 0
    warnings: tuple[str, ...] = ()
    purpose: Purpose = Purpose.GENERATE
    # Structured output: the compiled grammar; every returned sequence has its own state.
    grammar: Grammar | None = None
    # Set when the prompt's last token can become another one; the prompt then has at least two tokens.
    token_healing: TokenHealingOptions | None = None
    # Rows (hidden state, logits) are needed from this token on: a cached prefix may be reused up to here. None: only
    # the last row is needed.
    first_needed_row: int | None = None
    # The output's text begins anew instead of continuing the prompt's text; stop strings are matched in it.
    begins_text: bool = False
    # Markers of the thoughts before the answer; stop strings do not count in thoughts.
    thought: Thought | None = None
    # Embeddings in place of the first prompt tokens' ids; None: there are ids only.
    embeds: PromptEmbeds | None = None
    # Adapter of all its sequences, unconditional branches included; None: the base model.
    adapter: Adapter | None = None
    # Set by the engine for a mode that recalls outputs: those of the request's tenant.
    past_outputs: PastOutputs | None = None
    # Set by the engine.
    draft_costs: VerificationCosts | None = None
    # Set by the engine: what drafts for it is a draft head.
    has_draft_head: bool = False
    # Set by the engine: version of the model's weights that its first step has.
    weights_version: int = 0
    # Span of its trace; None: it has no trace. It ends with the request.
    span: Span | None = None

    def __post_init__(self) -> None:
        if self.params.mode.first_needed_row is not None:
            self.first_needed_row = self.params.mode.first_needed_row

    @property
    def block_salt(self) -> str:
        """Salt of its blocks' hashes."""
        return self.block_salt_on(self.weights_version)

    def block_salt_on(self, weights_version: int) -> str:
        """Return the salt of its blocks' hashes if it begins on this version of the weights: requests with two readings
        of an adapter share none, nor do those that begin on two versions."""
        salt = self.cache_salt
        if self.adapter is not None:
            salt = f"{routing_salt(salt, self.adapter.name)}\0{self.adapter.generation}"
        return f"{salt}\0weights {weights_version}" if weights_version else salt

    @property
    def known_prompt_ids(self) -> list[int]:
        """Ids of the prompt, without tokens that came as embeddings only."""
        return self.prompt_token_ids if self.embeds is None else self.prompt_token_ids[self.embeds.num_placeholders :]


def at_most_0(logprob: float) -> float:
    """Return the log-probability, at most 0 in spite of rounding. A NaN stays one."""
    return 0.0 if logprob > 0.0 else logprob


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position: natural log, after the processors. Rank 1 is the most likely."""

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
    """End of a returned sequence: reason, length and the stop string or id."""

    index: int
    reason: FinishReason
    num_tokens: int
    stop_token_id: int | None = None
    stop_string: str | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class StartedOutput:
    """Notice that the request was scheduled and its prompt is computed; sent just before the first delta."""

    cached_tokens: int
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    # Token healing: the prompt's new last token, and its text beyond that of the token that was sent.
    healed: tuple[int, str] | None = None


@dataclass(slots=True)
class Emission:
    """New ids of one returned sequence. A strategy makes it, the report numbers it, and it is delivered unchanged."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: SequenceFinish | None = None
    # One entry per token, or none at all.
    tensors: tuple[StepTensors | None, ...] = ()
    # Numbered over the request from 0, without gaps.
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
    """Last event of a request. Every accepted request gets exactly one."""

    sequences: tuple[SequenceFinish, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings: RequestTimings
    last_seq: int | None
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    # Purpose.EMBED: (hidden size), fp32, little-endian.
    embedding: bytes | None = None
    # Versions of the model's weights at its first step and at its end.
    weights_versions: tuple[int, int] = (0, 0)
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
    """Result of one item: the logprobs of Score, or an embedding in `finished`."""

    logprobs: tuple[PositionLogprobs, ...]
    finished: FinishedOutput
