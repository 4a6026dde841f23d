"""Write docs/reference/metrics.md from the registries of the services themselves.

python tools/metrics_table.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.common.metrics import GrpcServerMetrics
from penstock.gateway.metrics import GatewayMetrics
from penstock.generation.adapters.figures import AdapterFigures, AdapterInfo
from penstock.generation.metrics import GenerationMetrics
from penstock.router.keys.key_metrics import KeyMetrics
from penstock.router.metrics import RouterMetrics
from penstock.tokenizer.metrics import TokenizerMetrics
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from typing_extensions import override

TARGET = Path(__file__).resolve().parents[1] / "docs" / "reference" / "metrics.md"
HEAD = """\
# Metrics

Every process serves Prometheus metrics at `/metrics` of its `--metrics-port`, the gateway at its one port. Names
carry vLLM's suffixes where the meaning is the same. Labels come from closed sets; no text, id, secret or client string
is ever a label. Histograms are in the unit that their name ends in. The stage times are the same numbers as
`Finished.timings` of each answer.

This page is written by `python tools/metrics_table.py` from the registries of the services; a test compares them, and
checks that every query of the Grafana dashboard (`deploy/grafana/dashboards/penstock.json`) names metrics of it.
Besides these, every process has the standard `process_*` metrics (CPU, memory, file descriptors).
"""


_ADAPTER = AdapterInfo("name", Path(), 1, (), 0, is_loaded=True, num_requests=0, generation="")


class _Registry(CollectorRegistry):
    """A registry that remembers its collectors, since label names of labelled metrics show in no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    @override
    def register(self, collector: Collector) -> None:
        self.collectors.append(collector)
        super().register(collector)


def _families(collector: Collector) -> Iterable[tuple[Metric, tuple[str, ...]]]:
    declared = tuple(getattr(collector, "_labelnames", ()))
    for family in collector.collect():
        seen = {name for sample in family.samples for name in sample.labels} - {"le", "quantile"}
        yield family, declared or tuple(sorted(seen))


def families(service: str) -> dict[str, tuple[str, tuple[str, ...], str]]:
    """{exposed name: (type, labels, help)} of one service."""
    registry = _Registry()
    if service == "router":
        RouterMetrics(registry)
        KeyMetrics(registry)
    elif service == "gateway":
        GatewayMetrics(registry)
    elif service == "tokenizer":
        TokenizerMetrics(registry)
    elif service == "generation":
        # A metric by adapter has series while one is known.
        GenerationMetrics(registry, "model").read_adapters(AdapterFigures, lambda: (_ADAPTER,))
    else:
        GrpcServerMetrics(registry)
    rows = {}
    for collector in registry.collectors:
        for family, labels in _families(collector):
            name = family.name + ("_total" if family.type == "counter" else "")
            rows[name] = (family.type, labels, family.documentation)
    return dict(sorted(rows.items()))


def page() -> str:
    """The whole page."""
    titles = {"gateway": "Gateway", "router": "Router", "tokenizer": "Tokenizer", "generation": "Generation"}
    titles["grpc"] = "Every gRPC server"
    parts = [HEAD]
    for service, title in titles.items():
        parts.append(f"\n## {title}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n")
        for name, (kind, labels, text) in families(service).items():
            parts.append(f"| `{name}` | {kind} | {', '.join(labels)} | {text} |\n")
    return "".join(parts)


def main() -> None:
    """Write the page."""
    TARGET.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
