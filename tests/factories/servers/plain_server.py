"""Server of either transport with nothing around it: no service, no credentials, no drain; and one that only starts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from factories.servers.watched_health import WatchedHealth
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.config import ServerConfig
from penstock.common.metrics import GrpcServerMetrics
from penstock.serving.interceptors import CallInterceptor
from penstock.serving.transport import Server, make_transport
from prometheus_client import CollectorRegistry


def plain_server(transport: Any, port: int) -> Server:
    """Make a server that will listen at `port` (0: a free one) of the loopback address."""
    config = ServerConfig(transport=transport, port=port)
    most = config.max_concurrent_rpcs
    calls = CallInterceptor(
        GrpcServerMetrics(CollectorRegistry()), tokens=None, max_concurrent_rpcs=most, max_message_fields=65536
    )
    return make_transport(config).make_server(config, max_calls=most, wrap=calls.wrap, shares_port=False)


@dataclass
class StartingService:
    """A service that does not serve yet."""

    address: str = ""
    # Number of watches of its health.
    watches: int = 0

    async def on_watch(self) -> None:
        """Count one."""
        self.watches += 1


@asynccontextmanager
async def starting_service() -> AsyncIterator[StartingService]:
    """Run a process' server as it is while the process loads: its health is NOT_SERVING, and nothing else is there."""
    service = StartingService()
    server = plain_server(os.environ.get("PENSTOCK_TEST_TRANSPORT", ServerConfig.transport), 0)
    health = WatchedHealth(service.on_watch)
    for name in ("", "penstock.v1.TokenizerService", "penstock.v1.GenerationService"):
        await health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    service.address = f"127.0.0.1:{await server.open_port()}"
    await server.start()
    try:
        yield service
    finally:
        await server.stop(None)
