"""Metrics of several worker processes, summed as those of one service."""

from __future__ import annotations

import http.client
import threading
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

FETCH_SECONDS = 2.0
_OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}
# No proxy, whatever the environment names: workers are on this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Metrics that are equal in all workers, or refer to the oldest one: the lowest value stands for all.
_LOWEST = (
    "penstock_router_backend_up",
    "penstock_router_tokenizer_up",
    "process_start_time_seconds",
    "process_max_fds",
)
_CUMULATIVE = ("counter", "histogram", "summary")
_Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass
class _Family:
    """One metric: its samples by name and labels, in the order of their first appearance."""

    type: str
    documentation: str
    samples: dict[_Key, float] = field(default_factory=dict)
    # Exemplars of buckets: the latest one from any worker.
    exemplars: dict[_Key, Exemplar] = field(default_factory=dict)

    def add(self, name: str, key: _Key, value: float) -> None:
        known = self.samples.get(key)
        if known is None:
            self.samples[key] = value
        elif name in _LOWEST or name.endswith("_created"):
            self.samples[key] = min(known, value)
        else:
            self.samples[key] = known + value

    def note(self, key: _Key, exemplar: Exemplar) -> None:
        known = self.exemplars.get(key)
        if known is None or float(known.timestamp or 0) <= float(exemplar.timestamp or 0):
            self.exemplars[key] = exemplar


_Families = dict[str, _Family]


class SummedMetrics(Collector):
    """Collector that reads every worker's metrics. `add` and `retire` are for the event loop, `collect` for any thread.

    Counts of a dead worker stay as last read, so sums never fall.
    """

    def __init__(self, *, with_exemplars: bool = False) -> None:
        """Make it. `with_exemplars`: workers are read in the OpenMetrics format, which takes twice as long."""
        self._with_exemplars = with_exemplars
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        self._last: dict[str, _Families] = {}
        self._retired: _Families = {}

    def add(self, name: str, address: str) -> None:
        """Add a worker that serves metrics at `address` (host:port)."""
        with self._lock:
            self._addresses[name] = address

    def retire(self, name: str) -> None:
        """Note that a worker is gone."""
        with self._lock:
            self._addresses.pop(name, None)
            for family_name, family in self._last.pop(name, {}).items():
                if family.type in _CUMULATIVE:
                    _merge(self._retired, family_name, family)

    def describe(self) -> Iterable[Metric]:
        """Describe nothing: the workers' metrics are not known before they run."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Read every family of every worker, and sum them."""
        with self._lock:
            addresses = dict(self._addresses)
        fetched = {name: _fetch(address, self._with_exemplars) for name, address in addresses.items()}
        total: _Families = {}
        with self._lock:
            for name, families in fetched.items():
                # A dying worker: it is retired with its last counts.
                if families is not None and self._addresses.get(name) == addresses[name]:
                    self._last[name] = families
            for families in [self._retired, *self._last.values()]:
                for family_name, family in families.items():
                    _merge(total, family_name, family)
        return [_metric(name, family) for name, family in total.items()]


def _fetch(address: str, with_exemplars: bool) -> _Families | None:
    """Read the metrics of one worker; None when it does not answer."""
    try:
        request = urllib.request.Request(f"http://{address}/metrics", headers=_OPENMETRICS if with_exemplars else {})
        with _DIRECT.open(request, timeout=FETCH_SECONDS) as answer:
            text = answer.read().decode()
    except (OSError, http.client.HTTPException):  # HTTPException: it died during its answer
        return None
    families: _Families = {}
    parse = openmetrics_families if with_exemplars else text_string_to_metric_families
    for metric in parse(text):
        family = families.setdefault(metric.name, _Family(metric.type, metric.documentation))
        for sample in metric.samples:
            key = sample.name, tuple(sample.labels.items())
            family.add(metric.name, key, sample.value)
            if sample.exemplar is not None:
                family.note(key, sample.exemplar)
    return families


def _merge(into: _Families, name: str, family: _Family) -> None:
    known = into.setdefault(name, _Family(family.type, family.documentation))
    for key, value in family.samples.items():
        known.add(name, key, value)
    for key, exemplar in family.exemplars.items():
        known.note(key, exemplar)


def _metric(name: str, family: _Family) -> Metric:
    metric = Metric(name, family.documentation, family.type)
    metric.samples = [
        Sample(key[0], dict(key[1]), value, exemplar=family.exemplars.get(key)) for key, value in family.samples.items()
    ]
    return metric
