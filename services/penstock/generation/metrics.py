"""Prometheus metrics of the generation service; names as vLLM's where the meaning is the same.

Labels come from closed sets: model_name is the one served model, finished_reason the FinishReason values, reason a row
of common/error_reasons.py. The engine's own counters are read when Prometheus scrapes; the rest is updated once per
step or request, not per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import NamedTuple

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from penstock.common.errors import PenstockError
from penstock.common.histograms import StepHistogram
from penstock.common.metrics import BATCH_BUCKETS, LATENCY_BUCKETS, TOKEN_BUCKETS
from penstock.generation.core.request import FinishedOutput, FinishReason, Purpose, Request
from penstock.generation.engine.stats import EngineLoad, EngineStats, StepSample
from penstock.generation.engine.step_watch import StepView

_REASONS = {reason: reason.name.lower() for reason in FinishReason}


class EngineFigures(NamedTuple):
    """The engine's own counters, read at each scrape."""

    load: EngineLoad = EngineLoad()
    stats: EngineStats = EngineStats()
    step: StepView = StepView()


class GenerationMetrics:
    """All metrics of one process. Methods may be called from the event loop and the engine thread."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        labels = {"model_name": model_name}
        self._engine = EngineCollector(labels, registry)

        def histogram(name: str, text: str, buckets: Iterable[float] = LATENCY_BUCKETS) -> StepHistogram:
            return StepHistogram(f"penstock_{name}", text, labels, tuple(buckets), registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"penstock_{name}", text, ["model_name"], registry=registry).labels(model_name)

        self._first_token = histogram("time_to_first_token_seconds", "Request received to first token.")
        self._inter_token = histogram("inter_token_latency_seconds", "Between consecutive tokens of a sequence.")
        self._queue = histogram("request_queue_time_seconds", "Waiting before the first scheduled token.")
        self._prefill = histogram("request_prefill_time_seconds", "First scheduled to first sampled token.")
        self._decode = histogram("request_decode_time_seconds", "First to last sampled token.")
        self._total = histogram("e2e_request_latency_seconds", "Request received to its last word.")
        self._prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self._output_length = histogram("request_generation_tokens", "Output tokens of a request.", TOKEN_BUCKETS)
        self._step_tokens = histogram("iteration_tokens_total", "Tokens computed in one engine step.", TOKEN_BUCKETS)
        self._step_sequences = histogram("iteration_sequences", "Sequences in one engine step.", BATCH_BUCKETS)
        self._stages = {
            stage: histogram(f"engine_{stage}_seconds", f"Engine step: {stage}.", LATENCY_BUCKETS)
            for stage in ("schedule", "execute", "update")
        }
        self._draft = histogram("engine_draft_seconds", "Engine step: draft model, of steps in which it ran.")
        self._slow_readers = counter("slow_readers", "Streams cut off because their reader was too far behind.")
        name = ["model_name", "finished_reason"]
        finished = Counter(
            "penstock_request_success", "Requests by how their first sequence ended.", name, registry=registry
        )
        self._finished = {reason: finished.labels(model_name, label) for reason, label in _REASONS.items()}
        name = ["model_name", "reason"]
        words = "Requests to generate that were not accepted, by the error's reason."
        refused = Counter("penstock_requests_refused", words, name, registry=registry)
        # A reason is looked up once.
        self._refused = cache(partial(refused.labels, model_name))
        name = ["model_name", "rpc", "outcome"]
        items = Counter("penstock_items", "Items of Score and inputs of Embed, by outcome.", name, registry=registry)
        self._items = {
            (purpose, succeeded): items.labels(model_name, purpose.name.lower(), "ok" if succeeded else "error")
            for purpose in (Purpose.SCORE, Purpose.EMBED)
            for succeeded in (True, False)
        }

    def read_engine(self, read: Callable[[], EngineFigures]) -> None:
        """Take the engine's own figures from `read`, which must be callable from any thread."""
        self._engine.read = read

    def step(self, sample: StepSample) -> None:
        """Count one engine step."""
        self._step_tokens.observe(sample.num_tokens)
        self._step_sequences.observe(sample.num_sequences)
        self._stages["schedule"].observe(sample.schedule_seconds)
        self._stages["execute"].observe(sample.execute_seconds)
        self._stages["update"].observe(sample.update_seconds)
        if sample.draft_seconds:
            self._draft.observe(sample.draft_seconds)

    def first_token(self, seconds: float) -> None:
        """Observe the time to a request's first token."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """Observe a further token of `count` sequences, `seconds` after the token before."""
        self._inter_token.observe(seconds, count)

    def slow_reader(self) -> None:
        """Count a stream that was cut off."""
        self._slow_readers.inc()

    def request_finished(self, request: Request, finished: FinishedOutput) -> None:
        """Count a request by its last word."""
        if request.purpose is not Purpose.GENERATE:
            self._items[request.purpose, finished.error is None].inc()
            self._prompt_length.observe(finished.prompt_tokens)
            return
        timings = finished.timings
        for histogram, seconds in (
            (self._queue, timings.queue),
            (self._prefill, timings.prefill),
            (self._decode, timings.decode),
            (self._total, timings.total),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        self._prompt_length.observe(finished.prompt_tokens)
        self._output_length.observe(finished.completion_tokens)
        failed = finished.error is not None or not finished.sequences
        self._finished[FinishReason.ERROR if failed else finished.sequences[0].reason].inc()

    def request_refused(self, error: PenstockError) -> None:
        """Count a request to generate that was not accepted. It is none of those that `request_finished` counts."""
        self._refused(error.reason).inc()

    def request_failed(self) -> None:
        """Count a request that the broken engine left without a last word."""
        self._finished[FinishReason.ERROR].inc()


class EngineCollector(Collector):
    """Collector of gauges and counters that are read from the engine when Prometheus scrapes."""

    def __init__(self, labels: dict[str, str], registry: CollectorRegistry) -> None:
        self.read: Callable[[], EngineFigures] = EngineFigures
        self._labels = labels
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield the engine's present figures."""
        load, stats, step = self.read()
        usage = load.kv_blocks_used / load.kv_blocks_total if load.kv_blocks_total else 0.0
        yield self._gauge("num_requests_running", "Requests being computed.", load.running_requests)
        yield self._gauge("num_requests_waiting", "Requests waiting to be scheduled.", load.waiting_requests)
        yield self._gauge("num_sequences_running", "Sequences being computed.", load.running_sequences)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 1 means all.", usage)
        yield self._gauge("kv_cache_blocks", "KV blocks of the pool.", load.kv_blocks_total)
        yield self._counter("engine_steps", "Engine steps.", stats.steps)
        yield self._gauge(
            "engine_step_seconds", "Time that the engine step in progress has run; 0: none.", step.seconds
        )
        yield self._gauge("engine_hung", "1 while the step in progress hangs (--hung-step-seconds).", step.is_hung)
        yield self._counter("num_preemptions", "Requests preempted.", stats.preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens of accepted requests.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        accepted, rejected = stats.accepted_draft_tokens, stats.rejected_draft_tokens
        yield self._counter("generation_accepted_draft_tokens", "Draft tokens that verification accepted.", accepted)
        yield self._counter("generation_rejected_draft_tokens", "Draft tokens that verification refused.", rejected)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_lookup_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found cached.", stats.prefix_hit_tokens)
        yield self._counter("prefix_cache_evictions", "Reusable blocks given away.", stats.evictions)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"penstock_{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: int) -> Metric:
        family = CounterMetricFamily(f"penstock_{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
