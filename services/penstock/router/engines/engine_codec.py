"""Codec of another engine's protocol: its messages in the terms that all such engines share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.message import Message

from penstock.router.engines.engine_request import EngineRequest
from penstock.router.engines.engine_services import EngineServices
from penstock.serving.transport import Channel
from penstock.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class EngineEnd:
    """End of a sequence as an engine tells it."""

    # stop, length, abort, or whatever else it says.
    reason: str
    token_id: int | None = None
    text: str | None = None
    accepted_draft_tokens: int = 0
    draft_tokens: int = 0


@dataclass(slots=True)
class EngineChunk:
    """New tokens of one sequence, or its end."""

    token_ids: Sequence[int] = ()
    # Tokens of the prompt, and those among them that were cached.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    end: EngineEnd | None = None


class EngineCodec(Protocol):
    """Messages of one engine's protocol. It has no state."""

    # Name for people, full name of its service, path of its call that streams tokens, and that call's messages.
    name: str
    protocol: str
    generate_method: str
    response: type[Message]
    # Most alternatives of a log-probability.
    max_top_logprobs: int
    # Fields of SamplingParams (generation.core) that it has, beside those that every engine has.
    params: frozenset[str]
    # Kinds of a constraint that it takes.
    constraints: frozenset[str]
    # Calls with a single answer that it has.
    calls: frozenset[str]
    # True where requests of another cache_salt share no cached blocks.
    keeps_salts: bool

    def connect(self, channel: Channel, timeout: float) -> EngineServices:
        """Make the services of a channel. `timeout` is that of their calls, in seconds."""

    def lacks(self, request: EngineRequest) -> tuple[str, str] | None:
        """Return a field that it cannot do for a reason of its own, and the reason."""

    def generate(self, request: EngineRequest, index: int, request_id: str) -> Message:
        """Make the request of returned sequence `index`."""

    def read(self, message: Any, request: EngineRequest) -> EngineChunk:
        """Read a message of a Generate stream."""

    def score(self, token_ids: Sequence[int], alternatives: int, request_id: str, salt: str) -> Message:
        """Make the request of a stream that returns the log-probabilities of these tokens."""

    def read_scores(self, message: Any, alternatives: int) -> list[common_pb2.PositionLogprobs]:
        """Read the log-probabilities of a prompt from a message of such a stream; empty: it has none."""
