"""Prometheus' counter and histogram without their checks: they show what the library's own show."""

from __future__ import annotations

import pytest
from penstock.common.plain_metrics import PlainCounter, PlainHistogram
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.openmetrics.exposition import generate_latest

BUCKETS = (0.1, 1.0, 10.0)


def shown(counter: type[Counter], histogram: type[Histogram], exemplar: dict[str, str] | None) -> bytes:
    """Return the text of a registry, without the times at which it was made."""
    registry = CollectorRegistry()
    plain = counter("plain", "Plain.", registry=registry)
    count = counter("some", "Some.", ("kind",), registry=registry).labels("a")
    times = histogram("times", "Times.", ("kind",), registry=registry, buckets=BUCKETS).labels("a")
    plain.inc()
    for amount in (1, 2.5):
        count.inc(amount)
    for seconds in (0.0, 0.1, 0.11, 1.0, 9.0, 11.0):
        times.observe(seconds)
    if exemplar:
        count.inc(1, exemplar)
        times.observe(0.5, exemplar)
    lines = [line.split(b" # ")[0] for line in generate_latest(registry).splitlines() if b"_created" not in line]
    return b"\n".join(lines)


@pytest.mark.parametrize("exemplar", [None, {"trace_id": "1"}])
def test_they_show_what_the_library_s_own_show(exemplar: dict[str, str] | None) -> None:
    assert shown(PlainCounter, PlainHistogram, exemplar) == shown(Counter, Histogram, exemplar)


def test_an_exemplar_is_kept() -> None:
    registry = CollectorRegistry()
    PlainHistogram("times", "Times.", registry=registry, buckets=BUCKETS).observe(0.5, {"trace_id": "1"})
    assert b'# {trace_id="1"} 0.5' in generate_latest(registry)
