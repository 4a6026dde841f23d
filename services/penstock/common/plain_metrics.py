"""Counter and histogram of Prometheus for what is counted once a request.

Each check of the library's own for missing labels and wrong amounts costs as much as the counting, and its histogram
compares with one bound after the other. Callers name all labels and count upwards.
"""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Counter, Histogram
from typing_extensions import override


class PlainCounter(Counter):
    """Counter without checks."""

    @override
    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        if exemplar:
            super().inc(amount, exemplar)
        else:
            self._value.inc(amount)


class PlainHistogram(Histogram):
    """Histogram without checks that finds the bucket by halves."""

    @override
    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        if exemplar:
            super().observe(amount, exemplar)
        else:
            self._sum.inc(amount)
            self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)
