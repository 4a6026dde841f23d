"""Prometheus metrics of the generation service; names as vLLM's where the meaning is the same.

Labels come from closed sets: model_name is the one served model (empty: there is none), finished_reason the
FinishReason values, reason a row of common/error_reasons.py. The engine's own counters are read when Prometheus
scrapes; the rest is updated once per step or request, not per token. When another model is loaded, all begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from typing_extensions import override

from penstock.common.errors import PenstockError
from penstock.common.histograms import StepHistogram
from penstock.common.metrics import BATCH_BUCKETS, LATENCY_BUCKETS, TOKEN_BUCKETS
from penstock.generation.adapters.figures import AdapterFigures, AdapterInfo
from penstock.generation.core.block_store import StoreFigures
from penstock.generation.core.request import FinishedOutput, FinishReason, Purpose, Request
from penstock.generation.core.step import DraftKind
from penstock.generation.engine.stats import EngineLoad, EngineStats, StepSample
from penstock.generation.engine.step_watch import StepView

_REASONS = {reason: reason.name.lower() for reason in FinishReason}


class EngineFigures(NamedTuple):
    """The engine's own counters, read at each scrape."""

    load: EngineLoad = EngineLoad()
    stats: EngineStats = EngineStats()
    step: StepView = StepView()
    disk: StoreFigures = StoreFigures()
    is_paused: bool = False


class StateFigures(NamedTuple):
    """States of recurrent layers, read at each scrape; all 0 for a model without such layers."""

    slots: int = 0
    used: int = 0


class _ModelRegistry(CollectorRegistry):
    """Registry of one model's collectors. The process exposes them as long as it serves that model."""

    def __init__(self, outer: CollectorRegistry) -> None:
        super().__init__()
        self._outer = outer
        self._collectors: list[Collector] = []

    @override
    def register(self, collector: Collector) -> None:
        self._outer.register(collector)
        self._collectors.append(collector)

    def clear(self) -> None:
        """Unregister all of them."""
        for collector in self._collectors:
            self._outer.unregister(collector)
        self._collectors.clear()


class LoadMetrics:
    """Metrics of loads and of the bytes that they received. Used from the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.loaded = Gauge("penstock_model_loaded", "1 while a model is loaded.", registry=registry)
        ends = Counter(
            "penstock_model_loads",
            "Loads of a model, at the start or by LoadModel, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.ends = {outcome: ends.labels(outcome) for outcome in ("loaded", "refused", "failed", "cancelled")}
        self.seconds = Histogram(
            "penstock_model_load_seconds",
            "Time of the successful loads, including the arrival of their bytes.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.unloads = Counter("penstock_model_unloads", "Models that UnloadModel ended.", registry=registry)
        self.received_bytes = Counter(
            "penstock_model_received_bytes", "Bytes of models that LoadModel received.", registry=registry
        )


class WeightUpdateMetrics:
    """Metrics of WriteWeights. Used from the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.version = Gauge(
            "penstock_weights_version", "Version of the model's weights: 0 as loaded.", registry=registry
        )
        self.written_bytes = Counter(
            "penstock_weights_written_bytes",
            "Bytes of the tensors that WriteWeights put into the model.",
            registry=registry,
        )
        self.pause = Histogram(
            "penstock_weights_pause_seconds",
            "Time between two steps in which new weights took the place of the old ones.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )


class GenerationMetrics:
    """All metrics of one process. Methods may be called from the event loop and the engine thread."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.loads = LoadMetrics(registry)
        self.weights = WeightUpdateMetrics(registry)
        self._registry = _ModelRegistry(registry)
        self._model_name: str | None = None
        self.begin(model_name)

    def begin(self, model_name: str) -> None:
        """Count for this model from now on. Call it while no engine runs."""
        if model_name == self._model_name:
            return
        self._model_name, registry = model_name, self._registry
        registry.clear()
        labels = {"model_name": model_name}
        self.graphs = GraphMetrics(registry, model_name)
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
        self._total = histogram("e2e_request_latency_seconds", "Request received to its end.")
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
            "penstock_request_success", "Requests by the end of their first sequence.", name, registry=registry
        )
        self._finished = {reason: finished.labels(model_name, label) for reason, label in _REASONS.items()}
        name = ["model_name", "reason"]
        words = "Refused requests to generate, by the error's reason."
        refused = Counter("penstock_requests_refused", words, name, registry=registry)
        # A reason is looked up once.
        self._refused = cache(partial(refused.labels, model_name))
        words = "Failed loads of adapters for an operator or a router, by the error's reason."
        failed = Counter("penstock_adapter_load_failures", words, ["model_name", "reason"], registry=registry)
        self._adapter_failed = cache(partial(failed.labels, model_name))
        name = ["model_name", "rpc", "outcome"]
        items = Counter("penstock_items", "Items of Score and inputs of Embed, by outcome.", name, registry=registry)
        self._items = {
            (purpose, succeeded): items.labels(model_name, purpose.name.lower(), "ok" if succeeded else "error")
            for purpose in (Purpose.SCORE, Purpose.EMBED)
            for succeeded in (True, False)
        }

    @property
    def model_name(self) -> str:
        """Name of the model that is counted for."""
        return self._model_name or ""

    def read_engine(
        self,
        read: Callable[[], EngineFigures],
        block_bytes: int = 0,
        read_states: Callable[[], StateFigures] = StateFigures,
        group_names: Sequence[str] = (),
    ) -> None:
        """Take the engine's own figures from `read`, callable from any thread, as `read_states` is; `block_bytes` of
        one block; `group_names` of the model's groups of layers."""
        self._engine.read = read
        self._engine.block_bytes = block_bytes
        self._engine.read_states = read_states
        self._engine.group_names = tuple(group_names)

    def read_adapters(
        self, read: Callable[[], AdapterFigures], read_infos: Callable[[], Sequence[AdapterInfo]]
    ) -> None:
        """Take the figures of adapters, and facts of each, from functions that must be callable from any thread."""
        self._engine.read_adapters, self._engine.read_adapter_infos = read, read_infos

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
        """Count a request by its FinishedOutput."""
        if request.purpose is not Purpose.GENERATE:
            self._items[request.purpose, finished.error is None].inc()
            self._prompt_length.observe(finished.prompt_tokens)
            return
        timings, trace_id = finished.timings, request.span.exemplar if request.span is not None else ""
        for histogram, seconds in (
            (self._queue, timings.queue),
            (self._prefill, timings.prefill),
            (self._decode, timings.decode),
            (self._total, timings.total),
        ):
            if seconds is not None:
                histogram.observe_traced(seconds, trace_id)
        self._prompt_length.observe(finished.prompt_tokens)
        self._output_length.observe(finished.completion_tokens)
        failed = finished.error is not None or not finished.sequences
        self._finished[FinishReason.ERROR if failed else finished.sequences[0].reason].inc()

    def request_refused(self, error: PenstockError) -> None:
        """Count a refused request to generate. `request_finished` does not count it."""
        self._refused(error.reason).inc()

    def adapter_failed(self, error: PenstockError) -> None:
        """Count an adapter that could not be loaded."""
        self._adapter_failed(error.reason).inc()

    def request_failed(self) -> None:
        """Count a request that the broken engine left unfinished."""
        self._finished[FinishReason.ERROR].inc()


class EngineCollector(Collector):
    """Collector of gauges and counters; it reads the engine when Prometheus scrapes."""

    def __init__(self, labels: dict[str, str], registry: CollectorRegistry) -> None:
        self.read: Callable[[], EngineFigures] = EngineFigures
        self.read_adapters: Callable[[], AdapterFigures] = AdapterFigures
        self.read_adapter_infos: Callable[[], Sequence[AdapterInfo]] = tuple
        # Bytes of one KV block.
        self.block_bytes = 0
        self.read_states: Callable[[], StateFigures] = StateFigures
        # CacheGroup.name of each group of layers.
        self.group_names: tuple[str, ...] = ()
        self._labels = labels
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield the engine's present figures."""
        load, stats, step, disk, is_paused = self.read()
        yield self._gauge("num_requests_running", "Requests being computed.", load.running_requests)
        yield self._gauge("num_requests_waiting", "Requests waiting to be scheduled.", load.waiting_requests)
        yield self._gauge("num_sequences_running", "Sequences being computed.", load.running_sequences)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 1 means all.", load.kv_usage)
        yield self._gauge("kv_cache_blocks", "KV blocks of the pool.", load.kv_blocks_total)
        yield self._by_group(load)
        states = self.read_states()
        yield self._gauge("state_slots", "Room for states of recurrent layers, in states.", states.slots)
        yield self._gauge("state_slots_used", "States that sequences hold.", states.used)
        yield self._counter("engine_steps", "Engine steps.", stats.steps)
        yield self._gauge(
            "engine_step_seconds", "Time since the current engine step began; 0: there is none.", step.seconds
        )
        yield self._gauge("engine_hung", "1 while the step in progress hangs (--hung-step-seconds).", step.is_hung)
        yield self._gauge("engine_paused", "1 while a pause holds the engine's steps (the call Pause).", is_paused)
        yield self._counter("engine_pauses", "Pauses of the engine's steps.", stats.pauses)
        yield self._counter("num_preemptions", "Requests preempted.", stats.preemptions)
        yield self._counter("num_preemptions_swapped", "Preemptions that copied blocks to the host pool.", stats.swaps)
        yield self._counter(
            "preempted_tokens", "Computed tokens that the other preemptions discarded.", stats.preempted_tokens
        )
        yield from self._host_pool(load, stats)
        yield from self._disk(disk, stats)
        yield self._counter("prompt_tokens", "Prompt tokens of accepted requests.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield self._drafts("generation_accepted_draft_tokens", "Draft tokens that verification accepted.", stats, 0)
        yield self._drafts("generation_rejected_draft_tokens", "Draft tokens that verification rejected.", stats, 1)
        yield self._gauge("ngram_memory_tenants", "Tenants with remembered outputs.", stats.memory.tenants)
        yield self._gauge("ngram_memory_tokens", "Remembered output tokens.", stats.memory.tokens)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_lookup_tokens
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens)
        yield self._counter("prefix_cache_evictions", "Reusable blocks evicted.", stats.evictions)
        adapters = self.read_adapters()
        yield self._gauge("adapters_known", "LoRA adapters with a name.", adapters.known)
        yield self._gauge("adapters_loaded", "LoRA adapters in memory.", adapters.loaded)
        yield self._gauge(
            "adapter_bytes", "Memory of LoRA adapters, unloaded ones in use included.", adapters.num_bytes
        )
        yield self._counter("adapter_loads", "LoRA adapters read from their files.", adapters.loads)
        yield self._counter(
            "adapter_evictions", "Idle LoRA adapters evicted from memory for others.", adapters.evictions
        )
        yield self._by_adapter()

    def _by_group(self, load: EngineLoad) -> Metric:
        words = "KV blocks in use by what their layers read: all, window_N or chunk_N."
        family = GaugeMetricFamily("penstock_kv_cache_group_blocks_used", words, labels=[*self._labels, "layers"])
        # Kernels that read whole tiles may tell windows of one length apart.
        for name in dict.fromkeys(self.group_names):
            pairs = zip(self.group_names, load.group_blocks_used, strict=False)
            family.add_metric([*self._labels.values(), name], sum(used for one, used in pairs if one == name))
        return family

    def _by_adapter(self) -> Metric:
        # One label for each known adapter: its series ends when it is unloaded, and --max-known-adapters bounds their
        # number.
        words = "Unfinished requests with a LoRA adapter."
        family = GaugeMetricFamily("penstock_adapter_requests_running", words, labels=[*self._labels, "adapter"])
        for info in self.read_adapter_infos():
            family.add_metric([*self._labels.values(), info.name], info.num_requests)
        return family

    def _host_pool(self, load: EngineLoad, stats: EngineStats) -> Iterable[Metric]:
        usage = load.host_blocks_used / load.host_blocks_total if load.host_blocks_total else 0.0
        swapped = "Waiting requests with their blocks in the host pool."
        yield self._gauge("num_requests_swapped", swapped, load.swapped_requests)
        yield self._gauge(
            "cpu_cache_usage_perc", "Blocks of the host pool that swapped requests hold, 1 means all.", usage
        )
        yield self._gauge("cpu_cache_blocks", "Blocks of the host pool.", load.host_blocks_total)
        for name, where, blocks, seconds in (
            ("out", "to the host pool", stats.host_out_blocks, stats.host_out_seconds),
            ("in", "from the host pool", stats.host_in_blocks, stats.host_in_seconds),
        ):
            yield self._counter(f"swap_{name}_blocks", f"KV blocks copied {where}.", blocks)
            yield self._counter(f"swap_{name}_bytes", f"Bytes copied {where}.", blocks * self.block_bytes)
            yield self._counter(f"swap_{name}_seconds", f"Time that copies {where} took.", seconds)
        hits = "Prompt tokens found in the host pool; prefix_cache_hits counts them, too."
        yield self._counter("cpu_prefix_cache_hits", hits, stats.host_prefix_hit_tokens)
        yield self._counter("cpu_prefix_cache_evictions", "Prefixes that the host pool evicted.", stats.host_evictions)

    def _disk(self, disk: StoreFigures, stats: EngineStats) -> Iterable[Metric]:
        yield self._gauge("kv_disk_blocks", "Blocks that the file of --kv-disk has room for.", disk.blocks)
        waiting = "Blocks that wait to be written to the file of --kv-disk."
        yield self._gauge("kv_disk_queued_blocks", waiting, disk.queued_blocks)
        for name, where, blocks, seconds in (
            ("written", "written to", disk.written_blocks, disk.write_seconds),
            ("read", "read from", disk.read_blocks, disk.read_seconds),
        ):
            yield self._counter(f"kv_disk_{name}_blocks", f"KV blocks {where} the file of --kv-disk.", blocks)
            yield self._counter(
                f"kv_disk_{name}_bytes", f"Bytes {where} the file of --kv-disk.", blocks * self.block_bytes
            )
            yield self._counter(
                f"kv_disk_{name}_seconds", f"Time in which blocks were {where} the file, checked or skipped.", seconds
            )
        hits = "Prompt tokens read from the file of --kv-disk; prefix_cache_hits counts those that were used, too."
        yield self._counter("kv_disk_hits", hits, stats.disk_hit_tokens)
        refused = "Blocks of the file of --kv-disk that were not what was written: their tokens were computed."
        yield self._counter("kv_disk_refused_blocks", refused, disk.refused_blocks)
        failed = "Blocks that could not be written to the file of --kv-disk, or read from it."
        yield self._counter("kv_disk_failed_blocks", failed, disk.failed_blocks)
        dropped = "Blocks that the file of --kv-disk did not get, since --kv-disk-queue waited."
        yield self._counter("kv_disk_dropped_blocks", dropped, stats.disk_dropped_blocks)
        evicted = "Blocks of the file of --kv-disk that gave way to those of this process."
        yield self._counter("kv_disk_evicted_blocks", evicted, disk.evicted_blocks)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"penstock_{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _drafts(self, name: str, text: str, stats: EngineStats, verdict: int) -> Metric:
        """Return drafts by their origin; `verdict` 0: accepted, 1: refused."""
        family = CounterMetricFamily(f"penstock_{name}", text, labels=[*self._labels, "kind"])
        for kind in DraftKind:
            family.add_metric([*self._labels.values(), kind.value], stats.draft_tokens[kind][verdict])
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"penstock_{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


class GraphFigures(NamedTuple):
    """State of the model's opened parts, read at each scrape."""

    streams: int = 0
    leases: int = 0
    expired: int = 0
    tensors: int = 0
    tensor_bytes: int = 0
    blocks: int = 0
    used_blocks: int = 0


class GraphMetrics(Collector):
    """Metrics of the model's graphs, of tensors at the server and of named sequences."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._read: Callable[[], GraphFigures] = GraphFigures
        self._labels = {"model_name": model_name}
        names = ["model_name", "graph", "outcome"]
        calls = Counter("penstock_graph_calls", "Calls of graphs, and of Sample, by outcome.", names, registry=registry)
        self._calls = cache(partial(calls.labels, model_name))
        self._seconds = StepHistogram(
            "penstock_graph_seconds", "Engine's time for one call of a graph.", self._labels, LATENCY_BUCKETS, registry
        )
        registry.register(self)

    def read(self, read: Callable[[], GraphFigures]) -> None:
        """Take the state from `read`, which must be callable from any thread."""
        self._read = read

    @contextmanager
    def call(self, graph: str) -> Iterator[None]:
        """Count a call of a graph's kind: ok, or error for one that was refused, failed or abandoned."""
        try:
            yield
        except BaseException:
            self._calls(graph, "error").inc()
            raise
        self._calls(graph, "ok").inc()

    def took(self, seconds: float) -> None:
        """Observe the engine's time for a call."""
        self._seconds.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """Yield the present figures."""
        figures = self._read()
        for name, text, value in (
            ("graph_streams", "Open Forward streams.", figures.streams),
            ("graph_leases", "Leases, which own tensors and named sequences.", figures.leases),
            ("graph_tensors", "Tensors that callers keep at the server.", figures.tensors),
            ("graph_tensor_bytes", "Bytes of these tensors.", figures.tensor_bytes),
            ("graph_kv_blocks", "KV blocks for named sequences.", figures.blocks),
            ("graph_kv_blocks_used", "KV blocks that named sequences hold.", figures.used_blocks),
        ):
            gauge = GaugeMetricFamily(f"penstock_{name}", text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
        expired = CounterMetricFamily(
            "penstock_graph_leases_expired", "Leases that expired unused.", labels=list(self._labels)
        )
        expired.add_metric(list(self._labels.values()), figures.expired)
        yield expired
