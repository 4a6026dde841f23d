"""`http_proxy` in the environment: no connection to this machine goes through it; errors of others tell it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from factories.servers.router import backend, running_router
from factories.servers.trace_collector import trace_collector
from penstock.cli.client.silence import silence_of
from penstock.cli.health import _check
from penstock.common.config import ChannelConfig
from penstock.common.tracing import SpanKind
from penstock.router.config import RouterConfig
from penstock.serving.trace_export import start_tracing
from penstock_client import AsyncClient, Client, ClientConfig, RetryConfig, Unavailable


@dataclass
class Proxy:
    """One that refuses every connection, and counts them."""

    connections: int = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        writer.close()


@asynccontextmanager
async def proxied(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    proxy = Proxy()
    server = await asyncio.start_server(proxy.take, "127.0.0.1", 0)
    async with server:
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy", "grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, url)
        yield proxy


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_clients_of_this_machine_use_no_proxy(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    async with backend() as one, running_router(one) as router, proxied(monkeypatch) as proxy:
        address = f"{host}:{router.server.address.rpartition(':')[2]}"
        async with AsyncClient(address) as client:
            await client.wait_ready()
            assert (await client.generate("Hi")).choices[0].text

        def ask() -> str:
            with Client(address) as client:
                client.wait_ready()
                return client.generate("Hi").choices[0].text

        assert await asyncio.to_thread(ask)
        assert await _check(address, 60.0, ChannelConfig()) == "SERVING"
        assert proxy.connections == 0


async def test_an_error_tells_the_proxy_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxied(monkeypatch) as proxy:
        told = "of https_proxy; set no_proxy=router.invalid to avoid it"
        config = ClientConfig(retry=RetryConfig(max_attempts=1))
        async with AsyncClient("router.invalid:50051", config) as client:
            with pytest.raises(Unavailable, match=told):
                await client.generate("Hi")
            with pytest.raises(Unavailable, match=told):
                await client.tokenize("Hi")
            with pytest.raises(Unavailable, match=told):
                await client.wait_ready(0.01)
        assert proxy.connections

        def ask() -> None:
            with Client("router.invalid:50051", config) as client, pytest.raises(Unavailable, match=told):
                client.generate("Hi")

        await asyncio.to_thread(ask)
        silence = silence_of(
            "router.invalid:50051", tls=False, tls_ca=None, client_cert=None, client_key=None, name=None
        )
        assert told in silence.message
        assert told in await _check("router.invalid:50051", 60.0, ChannelConfig())


async def test_an_excepted_address_uses_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxied(monkeypatch) as proxy:
        monkeypatch.setenv("no_proxy", ".invalid")
        async with AsyncClient("router.invalid:50051", ClientConfig(retry=RetryConfig(max_attempts=1))) as client:
            with pytest.raises(Unavailable) as caught:
                await client.tokenize("Hi")
        assert "proxy" not in caught.value.message
        assert proxy.connections == 0


async def test_spans_for_a_collector_of_this_machine_use_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxied(monkeypatch) as proxy:
        with trace_collector() as collector:
            tracing = start_tracing(RouterConfig(backend=("x:1",), tracing_endpoint=collector.endpoint), "router")
            tracing.start("one", SpanKind.INTERNAL, None, {}).end()
            await asyncio.to_thread(tracing.close)
            collector.until(lambda spans: [span.name for span in spans] == ["one"])
        assert proxy.connections == 0
