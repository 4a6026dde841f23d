"""Histogram that takes many equal observations in one call, so that a step costs the same at any batch size."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from threading import Lock

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar


class StepHistogram(Collector):
    """Histogram of Prometheus with one label set. `observe` may be called from any thread."""

    def __init__(
        self, name: str, help_text: str, labels: dict[str, str], buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """Make it. `buckets` are ascending upper bounds; +Inf is added."""
        self._name, self._help, self._labels = name, help_text, labels
        self._bounds = [float(bound) for bound in buckets]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        # Bucket's place -> the last traced observation in it. In the OpenMetrics format only.
        self._exemplars: dict[int, Exemplar] = {}
        # The last value of `observe_one`, and the number of times that it came in a row; not in `_counts` yet.
        self._last_one, self._num_last = 0.0, 0
        self._lock = Lock()
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Record `count` observations of `value`."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += count
            self._sum += value * count

    def observe_one(self, value: float) -> None:
        """Record `value`. The buckets are looked at once for equal ones in a row, as of the sequences in one step. One
        thread alone may call it."""
        if value == self._last_one:
            self._num_last += 1
            return
        with self._lock:
            if self._num_last:
                self._counts[bisect_left(self._bounds, self._last_one)] += self._num_last
                self._sum += self._last_one * self._num_last
            self._last_one, self._num_last = value, 1

    def observe_traced(self, value: float, trace_id: str) -> None:
        """Record an observation of a request; its trace, if it has one, becomes the exemplar of its bucket."""
        self.observe(value)
        if trace_id:
            exemplar = Exemplar({"trace_id": trace_id}, value, time.time())
            with self._lock:
                self._exemplars[bisect_left(self._bounds, value)] = exemplar

    def collect(self) -> Iterable[Metric]:
        """Return the family with cumulative buckets."""
        with self._lock:
            counts, exemplars, num_last = list(self._counts), dict(self._exemplars), self._num_last
            counts[bisect_left(self._bounds, self._last_one)] += num_last
            total = self._sum + self._last_one * num_last
        cumulative = 0
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for place, (bound, count) in enumerate(zip([*self._bounds, float("inf")], counts, strict=True)):
            cumulative += count
            bucket, exemplar = (_label(bound), float(cumulative)), exemplars.get(place)
            buckets.append(bucket if exemplar is None else (*bucket, exemplar))
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, total)
        return [family]

    def describe(self) -> Iterable[Metric]:
        """Return the family without samples, so that a duplicate name is found at registration."""
        return [HistogramMetricFamily(self._name, self._help, labels=list(self._labels))]


def _label(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(bound)
