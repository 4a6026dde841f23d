"""Gateway in this process, before a router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
from penstock.gateway.app import GatewayApp
from penstock.gateway.config import GatewayConfig
from prometheus_client import CollectorRegistry


@dataclass
class Gateway:
    """A running gateway."""

    app: GatewayApp
    registry: CollectorRegistry
    _clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        """Return a client, which is closed after the gateway. One that is not would begin its end in whatever loop runs
        when it is collected."""
        client = openai.AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=60)
        self._clients.append(client)
        return client

    async def close_clients(self) -> None:
        """Close those that it made."""
        for client in self._clients:
            await client.close()

    @property
    def host_port(self) -> tuple[str, int]:
        """Its address, for a plain connection."""
        host, _, port = self.app.addresses.grpc.rpartition(":")
        return host, int(port)

    @property
    def url(self) -> str:
        """Base of OpenAI's paths."""
        return f"http://{self.app.addresses.grpc}/v1"

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric; 0 when it was never set."""
        return self.registry.get_sample_value(f"penstock_gateway_{name}", labels) or 0.0


@asynccontextmanager
async def running_gateway(router: str, **settings: Any) -> AsyncIterator[Gateway]:
    """Run a ready gateway on a free port before the router at that address."""
    registry = CollectorRegistry()
    app = GatewayApp(GatewayConfig(port=0, router=router, **settings), registry)
    gateway = Gateway(app, registry)
    try:
        await app.listen()
        await app.start()
        yield gateway
    finally:
        await app.stop(drain=False)
        await gateway.close_clients()
