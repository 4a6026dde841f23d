"""Server of one transport with a channel of the same to it, and no service around them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from penstock.common.config import ChannelConfig, ServerConfig
from penstock.common.metrics import GrpcServerMetrics
from penstock.serving.interceptors import CallInterceptor
from penstock.serving.transport import Channel, Server, ServerCall, make_transport
from penstock.v1 import tokenizer_pb2 as pb
from penstock.v1 import tokenizer_pb2_grpc
from prometheus_client import CollectorRegistry

Handle = Callable[[Any, Any], Any]


class Servicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Servicer with methods that each test sets."""

    def __init__(self) -> None:
        self.handle: Handle = lambda request, _: same(request)
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.call: Any = None

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> Any:
        return await self._run(request, context)

    async def GetDecodeTable(self, request: pb.GetDecodeTableRequest, context: Any) -> Any:
        await self._run(request, context)

    async def DecodeStream(self, requests: AsyncIterator[pb.DecodeStreamRequest], context: Any) -> Any:
        await self._run(requests, context)

    async def _run(self, request: Any, call: ServerCall) -> Any:
        self.call = call
        self.entered.set()
        try:
            return await self.handle(request, call)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class Setting:
    """A server of one transport and a channel of the same to it."""

    def __init__(self, transport: str, max_calls: int = 100) -> None:
        any_transport: Any = transport
        self.config = ServerConfig(transport=any_transport)
        self.transport = make_transport(self.config)
        self.servicer = Servicer()
        self.health: Any = HealthServicer()
        self.calls = CallInterceptor(
            GrpcServerMetrics(CollectorRegistry()), tokens=None, max_concurrent_rpcs=1000, max_message_fields=65536
        )
        self.server = self.make_server(self.config, max_calls)
        self.channel: Channel
        self.stub: Any
        self.port = 0

    def make_server(self, config: ServerConfig, max_calls: int = 100) -> Server:
        return self.transport.make_server(config, max_calls=max_calls, wrap=self.calls.wrap, shares_port=False)

    def open_channel(self, port: int = 0) -> contextlib.AbstractAsyncContextManager[Channel]:
        """Open a channel to the server, or to another one at `port`."""
        address = f"127.0.0.1:{port or self.port}"
        return self.transport.open_channel(address, ChannelConfig(), connect_timeout_seconds=60.0)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Setting]:
        server: Any = self.server
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self.servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        self.port = await self.server.open_port()
        await self.server.start()
        async with self.open_channel() as self.channel:
            self.stub = tokenizer_pb2_grpc.TokenizerServiceStub(self.channel.for_stubs)
            yield self
        await self.server.stop(None)


async def same(request: pb.GetTokenizerRequest) -> pb.GetTokenizerResponse:
    """Answer with the model of the request."""
    return pb.GetTokenizerResponse(model=request.model)
