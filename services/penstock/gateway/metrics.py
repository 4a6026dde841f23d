"""Prometheus metrics of the gateway: everything under `penstock_gateway_`. Labels come from closed sets only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.common.histograms import StepHistogram
from penstock.common.metrics import LATENCY_BUCKETS
from penstock.common.plain_metrics import PlainCounter

PREFIX = "penstock_gateway_"


class GatewayMetrics:
    """Metrics of one gateway process. `route` is a path of the table of routes, or `other`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        requests = PlainCounter(
            PREFIX + "http_requests_total",
            "Requests ended, by route and status.",
            ("route", "status"),
            registry=registry,
        )
        # Looking up a counter takes three times as long as counting.
        self.requests: Callable[..., Counter] = cache(requests.labels)
        self.running = Gauge(PREFIX + "http_requests_in_flight", "Requests in progress.", registry=registry)
        self.connections = Gauge(PREFIX + "http_connections", "Open connections.", registry=registry)
        self.strangers = Gauge(
            PREFIX + "http_anonymous_connections",
            "Open connections without an admitted request yet.",
            registry=registry,
        )
        self.evicted = Counter(
            PREFIX + "http_connections_evicted_total",
            "Connections that made room for others: of callers without a token, or idle.",
            registry=registry,
        )
        self.body_bytes = Gauge(
            PREFIX + "http_body_bytes", "Bytes of the bodies of requests, arriving or in progress.", registry=registry
        )
        self.first_token = StepHistogram(
            PREFIX + "time_to_first_token_seconds",
            "Request received to first bytes of a streamed answer.",
            {},
            LATENCY_BUCKETS,
            registry,
        )
        self.duration = StepHistogram(
            PREFIX + "http_request_duration_seconds", "Request received to its end.", {}, LATENCY_BUCKETS, registry
        )
        self.left = Counter(PREFIX + "readers_left_total", "Readers that left before the end.", registry=registry)
        self.stalled = Counter(
            PREFIX + "readers_stalled_total",
            "Readers cut off because they took nothing for too long.",
            registry=registry,
        )
        self.responses = Gauge(PREFIX + "kept_responses", "Responses kept for /v1/responses.", registry=registry)
        self.response_bytes = Gauge(PREFIX + "kept_response_bytes", "Bytes of the kept responses.", registry=registry)
        self.conversations = Gauge(
            PREFIX + "kept_conversations", "Conversations kept for /v1/conversations.", registry=registry
        )
        self.conversation_bytes = Gauge(
            PREFIX + "kept_conversation_bytes", "Bytes of the kept conversations.", registry=registry
        )
        self.background = Gauge(
            PREFIX + "background_responses_in_flight",
            "Responses that are made in the background now.",
            registry=registry,
        )
        ended = Counter(
            PREFIX + "background_responses_total",
            "Responses of the background that ended, by status: completed, incomplete, cancelled, failed.",
            ("status",),
            registry=registry,
        )
        self.background_ended: Callable[..., Counter] = cache(ended.labels)
        self.files = Gauge(
            PREFIX + "kept_files", "Files of /v1/files, answers of batches among them.", registry=registry
        )
        self.file_bytes = Gauge(PREFIX + "kept_file_bytes", "Bytes of these files.", registry=registry)
        self.batches = Gauge(PREFIX + "batches", "Batches in progress.", registry=registry)
        self.batch_lines_waiting = Gauge(
            PREFIX + "batch_lines_waiting", "Lines of batches in progress without an answer.", registry=registry
        )
        self.batch_lines_in_flight = Gauge(
            PREFIX + "batch_lines_in_flight", "Lines that are with the router now.", registry=registry
        )
        lines = Counter(
            PREFIX + "batch_lines_total",
            "Lines of batches by outcome: completed, failed, retried (sent again later), dropped (their batch ended).",
            ("outcome",),
            registry=registry,
        )
        self.batch_lines: Callable[..., Counter] = cache(lines.labels)
