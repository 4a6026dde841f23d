"""Buckets, the metrics of every gRPC server, and the Prometheus endpoint.

Each process has a CollectorRegistry of its own; no metric is registered globally. Label values come from closed sets.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, start_http_server

from penstock.common.errors import StartupError

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from penstock.common.config import ServerConfig

# Seconds. From a loopback hop (0.1 ms) to a long generation (10 minutes).
LATENCY_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
# Tokens of a prompt or an answer.
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
# Sequences of a batch.
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class GrpcServerMetrics:
    """Metrics grpc_server_*, with the names of grpc-ecosystem's go-grpc-middleware."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("grpc_type", "grpc_service", "grpc_method")
        self.started = Counter("grpc_server_started_total", "Calls begun.", labels, registry=registry)
        self.handled = Counter(
            "grpc_server_handled_total", "Calls ended, by status.", (*labels, "grpc_code"), registry=registry
        )
        self.handling = Histogram(
            "grpc_server_handling_seconds",
            "Time from begin to end.",
            labels,
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )


@dataclass
class BoundMetrics:
    """A running Prometheus endpoint."""

    host: str
    port: int
    _server: WSGIServer = field(repr=False)

    def close(self) -> None:
        """Stop answering; the port is free within half a second, since the server checks that often."""
        threading.Thread(target=self._shut_down, name="metrics-close", daemon=True).start()

    def _shut_down(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def start_metrics_server(
    registry: CollectorRegistry, host: str, port: int, *, tls: ServerConfig | None = None
) -> BoundMetrics:
    """Serve `registry` at http(s)://host:port/metrics from a daemon thread; port 0 takes a free one.

    With `tls` it uses that configuration's certificate, key and client CA. Raises StartupError naming --metrics-port.
    """
    secure: dict[str, str | bool] = {}
    if tls is not None and tls.tls_cert is not None:
        secure = {"certfile": str(tls.tls_cert), "keyfile": str(tls.tls_key)}
        if tls.tls_client_ca is not None:
            secure |= {"client_cafile": str(tls.tls_client_ca), "client_auth_required": True}
    try:
        server, _ = start_http_server(port, host, registry, **secure)  # type: ignore[arg-type]
    except OSError as error:
        raise StartupError(
            f"cannot serve metrics on {host}:{port}: {error.strerror or 'failed'}", flag="--metrics-port"
        ) from error
    return BoundMetrics(host, server.server_port, server)


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Add CPU, memory and file descriptors of this process (Linux)."""
    ProcessCollector(registry=registry)
