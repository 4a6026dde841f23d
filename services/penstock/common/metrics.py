"""Buckets, and the metrics of every gRPC server.

Each process has a CollectorRegistry of its own; no metric is registered globally. Label values come from closed sets.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector

from penstock.common.plain_metrics import PlainCounter, PlainHistogram

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
        self.started = PlainCounter("grpc_server_started_total", "Calls begun.", labels, registry=registry)
        self.handled = PlainCounter(
            "grpc_server_handled_total", "Calls ended, by status.", (*labels, "grpc_code"), registry=registry
        )
        self.handling = PlainHistogram(
            "grpc_server_handling_seconds",
            "Time from start to end.",
            labels,
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Add CPU, memory and file descriptors of this process (Linux)."""
    ProcessCollector(registry=registry)
