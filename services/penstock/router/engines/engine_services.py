"""Services of another engine beside its sessions: health, facts, load and aborts, in the terms of the router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

# Answers of an engine without the standard health service, or with one that does not know its protocol.
_NO_HEALTH = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Model and sizes that an engine tells of itself."""

    name: str
    max_context_tokens: int
    # None: its protocol does not tell them, and the tokenizer's count.
    vocab_size: int | None
    eos_token_ids: tuple[int, ...] | None
    # False: it embeds texts.
    generates: bool = True
    architecture: str = ""
    model_type: str = ""
    default_sampling_params_json: str = ""
    # Most requests that it runs at once, and tokens that its KV memory holds; 0: not known.
    max_running_requests: int = 0
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ToldLoad:
    """Load that an engine tells. `kv_usage` is a share of its KV memory."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


class EngineServices(Protocol):
    """Calls of one connection. Each raises grpc.aio.AioRpcError where the engine does not answer."""

    async def is_healthy(self) -> bool:
        """Return True while it takes requests. UNIMPLEMENTED where it speaks another protocol."""

    async def facts(self) -> EngineFacts:
        """Return its facts."""

    async def load(self) -> ToldLoad | None:
        """Return its load; None where its protocol does not tell it."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests there."""

    def generate(self, message: Message, timeout: float | None) -> Any:
        """Begin the stream of one request outside of a session."""

    async def embed(
        self, token_ids: Sequence[int], request_id: str, timeout: float | None
    ) -> tuple[Sequence[float], int]:
        """Return an embedding and the number of tokens it is of."""

    def tokenizer_files(self, timeout: float) -> Any | None:
        """Begin the stream of its tokenizer's files; None where its protocol has none."""

    def cache_events(self) -> Any | None:
        """Begin the stream of its cache's events; None where its protocol has none."""


async def standard_health(stub: health_pb2_grpc.HealthStub, service: str, timeout: float) -> bool | None:
    """Return what the standard health service tells of a service; None where it tells nothing."""
    try:
        told = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
    except grpc.aio.AioRpcError as error:
        if error.code() not in _NO_HEALTH:
            raise
        return None
    return bool(told.status == health_pb2.HealthCheckResponse.SERVING)
