"""The router's Prometheus metrics: everything under `penstock_router_`. Labels come from closed sets only.

Usual figures carry vLLM's suffixes (time_to_first_token_seconds, inter_token_latency_seconds,
e2e_request_latency_seconds). Stage times are the very numbers that travel in Finished.timings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.common.metrics import LATENCY_BUCKETS, TOKEN_BUCKETS
from penstock.v1 import common_pb2

PREFIX = "penstock_router_"


class FastHistogram(Collector):
    """A histogram for the per-token path: one bisection, no lock (one thread observes, a scrape may lag by one)."""

    def __init__(self, name: str, help: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._help = name, help
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), list(self._counts), strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], buckets=buckets, sum_value=self._sum)
        return [family]


class RouterMetrics:
    """What the router counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, help, labels, registry=registry)

        def gauge(name: str, help: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, help, labels, registry=registry)

        def seconds(name: str, help: str) -> Histogram:
            return Histogram(PREFIX + name, help, buckets=LATENCY_BUCKETS, registry=registry)

        self.requests = counter("requests_total", "Requests ended, by method and status.", "method", "status")
        self.finished = counter("request_success_total", "Sequences ended, by reason.", "finished_reason")
        self.live = gauge("num_requests_running", "Requests admitted and not ended.")
        self.waiting = gauge("num_requests_waiting", "Requests waiting for admission.")
        self.template = seconds("template_seconds", "Rendering of a chat template.")
        self.tokenize = seconds("tokenize_seconds", "Encoding of a prompt.")
        self.route = seconds("route_seconds", "Admission and choice of a backend.")
        self.detokenize = seconds("detokenize_seconds", "Time in DecodeStream, per request.")
        self.first_token = seconds("time_to_first_token_seconds", "Request received to first token.")
        self.end_to_end = seconds("e2e_request_latency_seconds", "Request received to Finished.")
        self.inter_token = FastHistogram(
            PREFIX + "inter_token_latency_seconds", "Between deltas of a sequence.", LATENCY_BUCKETS, registry
        )
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of finished requests.")
        self.generation_tokens = counter("generation_tokens_total", "Tokens passed on to clients.")
        self.cached_tokens = counter("prefix_cache_hit_tokens_total", "Prompt tokens found cached by backends.")
        self.request_tokens = Histogram(
            PREFIX + "request_generation_tokens", "Tokens of an answer.", buckets=TOKEN_BUCKETS, registry=registry
        )
        self.retries = counter("retries_total", "Requests tried again before their first token.")
        self.moves = counter("moves_total", "Streams moved to another backend after their first token.")
        self.poisoned = counter("poisoned_requests_total", "Requests given up since every backend they ran on died.")
        self.stale_frames = counter("stale_frames_total", "Frames dropped: of an attempt that was given up.")
        self.coalesced = counter("coalesced_deltas_total", "Deltas merged since the reader was behind.")
        self.slow_readers = counter("slow_readers_total", "Streams cut off since the reader was too far behind.")
        self.tokenizer_reconnects = counter("tokenizer_reconnects_total", "Times the tokenizer had to be reconnected.")
        self.tokenizer_up = gauge("tokenizer_up", "1 while the tokenizer answers.")
        self.backends_up = gauge("backend_up", "Ready backends of a configured target.", "backend")
        self.backend_requests = counter("backend_requests_total", "Attempts sent, by configured target.", "backend")
        self.backend_losses = counter("backend_losses_total", "Backends lost, by configured target.", "backend")

    def observe_timings(self, timings: common_pb2.StageTimings) -> None:
        """The stages that this process measured."""
        for stage, histogram in (
            ("template_seconds", self.template),
            ("tokenize_seconds", self.tokenize),
            ("route_seconds", self.route),
            ("detokenize_seconds", self.detokenize),
            ("time_to_first_token_seconds", self.first_token),
            ("total_seconds", self.end_to_end),
        ):
            if timings.HasField(stage):  # type: ignore[arg-type]
                histogram.observe(getattr(timings, stage))
