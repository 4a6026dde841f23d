"""Server of either transport with nothing around it: no service, no credentials, no drain."""

from __future__ import annotations

from typing import Any

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
