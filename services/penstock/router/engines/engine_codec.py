"""Codec of another engine's protocol: its messages in the terms that all such engines share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from penstock.router.engines.engine_request import EngineRequest
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
    """Messages of one engine's protocol. It has no state.

    The stub has Abort, Embed, GetLoads, GetModelInfo, GetServerInfo, GetTokenizer, HealthCheck and SubscribeKvEvents.
    """

    # Name for people, full name of its service, and the most alternatives of a log-probability.
    name: str
    service: str
    max_top_logprobs: int
    # Module of its messages: their names are the same for all engines.
    messages: ModuleType
    # Fields of SamplingParams (generation.core) that it has, beside those that every engine has.
    params: frozenset[str]
    # Kinds of a constraint that it takes.
    constraints: frozenset[str]
    # Calls with a single answer that it has.
    calls: frozenset[str]

    def make_stub(self, channel: grpc.aio.Channel) -> Any:
        """Make the stub of its service."""

    def lacks(self, request: EngineRequest) -> tuple[str, str] | None:
        """Return a field that it cannot do for a reason of its own, and the reason."""

    def generate(self, request: EngineRequest, index: int, request_id: str) -> Message:
        """Make the request of returned sequence `index`."""

    def read(self, message: Any, request: EngineRequest) -> EngineChunk:
        """Read a message of a Generate stream."""

    def aborts(self, request_ids: Sequence[str]) -> list[Message]:
        """Make the requests of Abort."""

    def window(self, server: Any) -> int:
        """Return the most requests that it runs at once from GetServerInfo; 0: it does not tell."""

    def score(self, token_ids: Sequence[int], alternatives: int, request_id: str) -> Message:
        """Make the Generate request that returns the log-probabilities of these tokens."""

    def read_scores(self, message: Any, alternatives: int) -> list[common_pb2.PositionLogprobs]:
        """Read the log-probabilities of a prompt from a message of such a stream; empty: it has none."""
