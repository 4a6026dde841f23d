"""Metrics by vLLM's names that endpoint pickers of the Gateway API read (--vllm-engine): queue, KV cache, adapters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from penstock.generation.adapters.figures import AdapterInfo
from penstock.generation.lifecycle import Lifecycle
from penstock.generation.service import GenerationCore


class VllmEngineMetrics(Collector):
    """Collector of the names of the pickers' protocol of model servers; it reads the engine when it is scraped.

    A process without a model shows none of them.
    """

    def __init__(self, lifecycle: Lifecycle, max_adapters: int, clock: Callable[[], float] = time.time) -> None:
        """`max_adapters`: that may be in memory. `clock` tells the time of a scrape, in seconds since 1970."""
        self._lifecycle = lifecycle
        self._max_adapters = max_adapters
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        """Yield the present figures."""
        core = self._lifecycle.core
        if core is None:
            return
        load = core.load
        yield self._gauge("num_requests_waiting", "Requests waiting to be scheduled.", load.waiting_requests)
        yield self._gauge("num_requests_running", "Requests being computed.", load.running_requests)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 1 means all.", load.kv_usage)
        yield self._cache(core)
        infos = core.loaded.weights.adapters.infos()
        if infos:
            yield self._adapters(infos)

    def _cache(self, core: GenerationCore) -> Metric:
        config = core.loaded.engine.config
        # Blocks of tokens: all layers keep one in that many.
        told = {"block_size": str(config.block_size), "num_gpu_blocks": str(config.num_blocks // config.bundle_blocks)}
        return self._gauge("cache_config_info", "Size of the KV cache, in its labels.", 1, told)

    def _adapters(self, infos: Sequence[AdapterInfo]) -> Metric:
        told = {
            "max_lora": str(self._max_adapters),
            "running_lora_adapters": ",".join(one.name for one in infos if one.is_loaded),
            "waiting_lora_adapters": ",".join(one.name for one in infos if one.num_requests and not one.is_loaded),
        }
        # Of several series a picker believes the one with the largest value.
        return self._gauge(
            "lora_requests_info", "LoRA adapters, in labels; its value is the time.", self._clock(), told
        )

    def _gauge(self, name: str, text: str, value: float, more: dict[str, str] | None = None) -> Metric:
        labels = {"model_name": self._lifecycle.model_name, **(more or {})}
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family
