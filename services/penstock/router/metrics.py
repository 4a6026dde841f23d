"""Prometheus metrics of the router: everything under `penstock_router_`. Labels come from closed sets only.

Usual figures carry vLLM's suffixes (time_to_first_token_seconds, inter_token_latency_seconds,
e2e_request_latency_seconds). Stage times are the numbers that travel in Finished.timings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.common.histograms import StepHistogram
from penstock.common.metrics import LATENCY_BUCKETS, TOKEN_BUCKETS
from penstock.common.plain_metrics import PlainCounter, PlainHistogram
from penstock.v1 import common_pb2, generation_pb2

PREFIX = "penstock_router_"
# Label of requests that named no model there is: a client's own string is never a label.
UNKNOWN_MODEL = "other"


class RouterMetrics:
    """Metrics of one router process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help: str, *labels: str) -> Counter:
            return PlainCounter(PREFIX + name, help, labels, registry=registry)

        def counters(name: str, help: str, *labels: str) -> Callable[..., Counter]:
            # Keyed by label values: looking up a counter takes three times as long as counting.
            return cache(counter(name, help, *labels).labels)

        def gauge(name: str, help: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, help, labels, registry=registry)

        def gauges(name: str, help: str, *labels: str) -> Callable[..., Gauge]:
            return cache(gauge(name, help, *labels).labels)

        def times(name: str, help: str, *labels: str) -> Callable[..., Histogram]:
            # Observed once for a request: see StepHistogram for what is observed for a token.
            found = PlainHistogram(PREFIX + name, help, labels, registry=registry, buckets=LATENCY_BUCKETS)
            return cache(found.labels)

        def histogram(name: str, help: str, buckets: Sequence[float]) -> StepHistogram:
            return StepHistogram(PREFIX + name, help, {}, buckets, registry)

        def seconds(name: str, help: str) -> StepHistogram:
            return histogram(name, help, LATENCY_BUCKETS)

        self.requests = counters("requests_total", "Requests ended, by method and status.", "method", "status")
        self.finished = counters("request_success_total", "Sequences ended, by reason.", "finished_reason")
        self.live = gauge("num_requests_running", "Requests admitted and not ended.")
        self.waiting = gauge("num_requests_waiting", "Requests waiting for admission.")
        self.template = seconds("template_seconds", "Rendering of a chat template.")
        self.tokenize = seconds("tokenize_seconds", "Encoding of a prompt.")
        self.route = seconds("route_seconds", "Admission and choice of a backend.")
        self.detokenize = seconds("detokenize_seconds", "Turning ids into text, per request.")
        self.first_token = seconds("time_to_first_token_seconds", "Request received to first token.")
        self.end_to_end = seconds("e2e_request_latency_seconds", "Request received to Finished.")
        self.score_embed = seconds("score_embed_seconds", "Score, Embed, DetectWatermark: request to answer.")
        self.inter_token = seconds("inter_token_latency_seconds", "Between deltas of a sequence.")
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of finished requests.")
        self.generation_tokens = counter("generation_tokens_total", "Tokens passed on to clients.")
        self.cached_tokens = counter("prefix_cache_hit_tokens_total", "Prompt tokens found cached by backends.")
        self.request_tokens = histogram("request_generation_tokens", "Tokens of an answer.", TOKEN_BUCKETS)
        self.retries = counter("retries_total", "Requests tried again before their first token.")
        self.moves = counter("moves_total", "Streams moved to another backend after their first token.")
        self.poisoned = counter("poisoned_requests_total", "Requests given up as the cause of backends' crashes.")
        self.stale_frames = counter("stale_frames_total", "Frames dropped: of an attempt that was given up.")
        self.coalesced = counter("coalesced_deltas_total", "Deltas merged since the reader was behind.")
        self.slow_readers = counter("slow_readers_total", "Streams cut off since the reader was too far behind.")
        self.tokenizer_reconnects = counter("tokenizer_reconnects_total", "Times the tokenizer had to be reconnected.")
        self.tokenizer_up = gauge("tokenizer_up", "1 while the tokenizer answers.")
        self.model_requests = counters(
            "model_requests_total", "Requests ended, by model and status.", "model", "status"
        )
        self.model_live = gauges("model_requests_live", "Requests that have come and not ended.", "model")
        self.model_prompt_tokens = counters("model_prompt_tokens_total", "Prompt tokens, by model.", "model")
        self.model_tokens = counters("model_generation_tokens_total", "Tokens of answers, by model.", "model")
        self.model_first_token = times(
            "model_time_to_first_token_seconds", "Request received to first token, by model.", "model"
        )
        self.model_end_to_end = times(
            "model_e2e_request_latency_seconds", "Request received to Finished, by model.", "model"
        )
        self.model_loads = counters(
            "model_loads_total", "Loads of models on demand, by model and outcome.", "model", "outcome"
        )
        self.model_unloads = counters(
            "model_unloads_total", "Unloads of models on demand: idle, room, roll or removed.", "model", "cause"
        )
        self.model_load_seconds = seconds("model_load_seconds", "Load of a model on demand.")
        self.model_loaded = gauges("model_loaded", "1 while a model on demand is in a slot.", "model")
        self.backends_up = gauge("backend_up", "Ready backends of a configured target.", "backend")
        self.backend_requests = counters("backend_requests_total", "Attempts sent, by configured target.", "backend")
        self.backend_failures = counters(
            "backend_failures_total",
            "Failures of backends, by configured target and kind; a loss counts once, with all requests that it took.",
            "backend",
            "kind",
        )
        self.ejections = counter(
            "backend_ejections_total", "Backends ejected, by target and cause.", "backend", "cause"
        )
        self.backends_ejected = gauge("backend_ejected", "Backends kept out of use, by target.", "backend")
        self.adapter_loads = counters(
            "adapter_loads_total", "Adapters that a backend was asked to load for requests, by outcome.", "outcome"
        )
        self.backend_losses = counter("backend_losses_total", "Backends lost, by configured target.", "backend")

    def observe_model(self, model: str, finished: generation_pb2.Finished) -> None:
        """Record the end of an answer for its model."""
        self.model_prompt_tokens(model).inc(finished.usage.prompt_tokens)
        self.model_tokens(model).inc(finished.usage.completion_tokens)
        timings = finished.timings
        self.model_end_to_end(model).observe(timings.total_seconds)
        if timings.HasField("time_to_first_token_seconds"):
            self.model_first_token(model).observe(timings.time_to_first_token_seconds)

    def observe_timings(self, timings: common_pb2.StageTimings, trace_id: str = "") -> None:
        """Record the stages that this process measured, in seconds; `trace_id` as in StepHistogram.observe_traced."""
        for stage, histogram in (
            ("template_seconds", self.template),
            ("tokenize_seconds", self.tokenize),
            ("route_seconds", self.route),
            ("detokenize_seconds", self.detokenize),
            ("time_to_first_token_seconds", self.first_token),
            ("total_seconds", self.end_to_end),
        ):
            if timings.HasField(stage):  # type: ignore[arg-type]
                histogram.observe_traced(getattr(timings, stage), trace_id)
