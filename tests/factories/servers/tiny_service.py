"""Server around a minimal service, for tests of the parts that all services share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.config import ChannelConfig, ServerConfig
from penstock.common.errors import InvalidArgument, ResourceExhausted
from penstock.serving.channels import open_channel
from penstock.serving.server import RunningServer, serve_in_process
from penstock.v1 import tokenizer_pb2 as pb
from penstock.v1 import tokenizer_pb2_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NAME = "penstock.v1.TokenizerService"


class Servicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Servicer that behaves as the `model` field says."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.entered = asyncio.Event()
        self.closed = asyncio.Event()

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:
        if request.model == "wait":
            self.entered.set()
            await self.release.wait()
        if request.model == "refuse":
            raise InvalidArgument("model", "must not be 'refuse'")
        if request.model == "break":
            raise ValueError("a secret prompt")
        return pb.GetTokenizerResponse(model=request.model, vocab_size=7)

    async def GetDecodeTable(
        self, request: pb.GetDecodeTableRequest, context: Any
    ) -> AsyncIterator[pb.GetDecodeTableResponse]:
        """Send twenty messages with a piece of so many bytes: the model is "SIZE", "SIZE wait" or "SIZE refuse"."""
        size, *then = request.model.split()
        try:
            for place in range(20):
                yield pb.GetDecodeTableResponse(strip_count=place, pieces=[bytes(int(size))])
            if then == ["wait"]:
                self.entered.set()
                await self.release.wait()
            if then == ["refuse"]:
                raise InvalidArgument("model", "must not be 'refuse'")
        finally:
            self.closed.set()

    async def DecodeStream(
        self, request_iterator: AsyncIterator[pb.DecodeStreamRequest], context: Any
    ) -> AsyncIterator[pb.DecodeStreamResponse]:
        try:
            async for request in request_iterator:
                if request.items and request.items[0].stream_id == 13:
                    raise ResourceExhausted("slow reader", reason="SLOW_READER", retry_after_seconds=0.25)
                yield pb.DecodeStreamResponse(detokenize_seconds=len(request.items))
        finally:
            self.closed.set()


class TinyService:
    """Minimal implementation of Service."""

    name = "tokenizer"
    grpc_services = (NAME,)

    def __init__(self) -> None:
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.servicer = Servicer()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.set_serving: Callable[[bool], Awaitable[None]] | None = None

    def bind_health(self, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        self.set_serving = set_serving

    async def start(self) -> None:
        await self.may_start.wait()

    def register(self, server: grpc.aio.Server) -> None:
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self.servicer, server)

    async def drain(self) -> None:
        self.servicer.release.set()

    async def close(self) -> None:
        pass

    def status_lines(self) -> list[str]:
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedConfig(ServerConfig):
    """Configuration that is served by its own transport, whatever PENSTOCK_TEST_TRANSPORT is."""


AsyncioConfig = partial(FixedConfig, transport="asyncio")


def _on_wanted_transport(config: ServerConfig) -> ServerConfig:
    """Return `config` with the transport of PENSTOCK_TEST_TRANSPORT."""
    wanted: Any = os.environ.get("PENSTOCK_TEST_TRANSPORT")
    return dataclasses.replace(config, transport=wanted) if wanted and type(config) is ServerConfig else config


@contextlib.asynccontextmanager
async def tiny(
    config: ServerConfig | None = None, channel: ChannelConfig | None = None
) -> AsyncIterator[tuple[TinyService, RunningServer, Any]]:
    """Yield (service, running server, stub) on a free port."""
    service = TinyService()
    async with (
        serve_in_process(service, _on_wanted_transport(config or ServerConfig())) as running,
        open_channel(running.address, channel or ChannelConfig()) as opened,
    ):
        yield service, running, tokenizer_pb2_grpc.TokenizerServiceStub(opened)


async def health_of(address: str, service: str = "", config: ChannelConfig | None = None) -> int:
    async with open_channel(address, config or ChannelConfig()) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return answer.status
