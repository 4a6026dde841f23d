"""A server of either transport with nothing around it: no service, no credentials, no drain."""

from __future__ import annotations

from typing import Any

import grpc
from penstock.common.config import ServerConfig
from penstock.common.metrics import GrpcServerMetrics
from penstock.http2.limits import Limits
from penstock.http2.server import Http2Server
from penstock.serving.grpc_options import server_options
from penstock.serving.interceptors import CallInterceptor
from prometheus_client import CollectorRegistry

_MAX_CALLS = 4096


def plain_server(transport: str) -> Any:
    """A grpc.aio.Server, or what stands for one."""
    config = ServerConfig()
    if transport == "grpc":
        return grpc.aio.server(options=server_options(config))
    calls = CallInterceptor(
        GrpcServerMetrics(CollectorRegistry()), tokens=None, max_concurrent_rpcs=config.max_concurrent_rpcs
    )
    limits = Limits.of(config, max_streams=_MAX_CALLS)
    return Http2Server(limits, interceptor=calls, max_calls=_MAX_CALLS)


async def listen(server: Any, port: int) -> int:
    """Open `port` (0: a free one) of the loopback address and return it."""
    if isinstance(server, Http2Server):
        return await server.listen("127.0.0.1", port, None, shares_port=False)
    return int(server.add_insecure_port(f"127.0.0.1:{port}"))
