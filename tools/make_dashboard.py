"""Write deploy/grafana/dashboards/penstock.json: rows of panels over the metrics of docs/reference/metrics.md.

The variable `datasource` chooses the Prometheus, `instance` and `model` choose processes and models. Queries are
narrowed by those of the last two that their metrics have.

python tools/make_dashboard.py
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "dashboards" / "penstock.json"
# The variable's value: a Prometheus of the Grafana that imports the dashboard, by default its default one.
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
RATE = "$__rate_interval"


def quantiles(metric: str) -> list[tuple[str, str]]:
    """p50 and p99 of a histogram over all processes."""
    query = f"sum by (le) (rate({metric}_bucket[{RATE}]))"
    return [(f"histogram_quantile({q}, {query})", f"p{q * 100:.0f}") for q in (0.5, 0.99)]


def mean(metric: str, legend: str) -> tuple[str, str]:
    """Mean of a histogram."""
    return f"sum(rate({metric}_sum[{RATE}])) / sum(rate({metric}_count[{RATE}]))", legend


def rate(metric: str, legend: str, by: str = "") -> tuple[str, str]:
    """Per-second rate of a counter."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[{RATE}]))", legend


ROUTER, TOKENIZER, DRAFTS = "penstock_router_", "penstock_tokenizer_", "penstock_generation_"
GATEWAY = "penstock_gateway_"
ERRORS = f'sum by (grpc_service, grpc_code) (rate(grpc_server_handled_total{{grpc_code!="OK"}}[{RATE}]))'
# Row title -> panels: (title, unit, queries)
ROWS: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "What users see": [
        ("Requests by status", "reqps", [rate(ROUTER + "requests_total", "{{method}} {{status}}", "method, status")]),
        ("Time to first token", "s", quantiles(ROUTER + "time_to_first_token_seconds")),
        ("Inter-token latency", "s", quantiles(ROUTER + "inter_token_latency_seconds")),
        ("End-to-end latency", "s", quantiles(ROUTER + "e2e_request_latency_seconds")),
    ],
    "Where the time goes": [
        (
            "Mean time of each stage",
            "s",
            [
                mean(ROUTER + "template_seconds", "template"),
                mean(ROUTER + "tokenize_seconds", "tokenize"),
                mean(ROUTER + "route_seconds", "route"),
                mean("penstock_request_queue_time_seconds", "queue"),
                mean("penstock_request_prefill_time_seconds", "prefill"),
                mean("penstock_request_decode_time_seconds", "decode"),
                mean(ROUTER + "detokenize_seconds", "detokenize"),
            ],
        ),
        (
            "Mean time of an engine step",
            "s",
            [mean(f"penstock_engine_{stage}_seconds", stage) for stage in ("schedule", "execute", "update", "draft")],
        ),
        ("Queue time", "s", quantiles("penstock_request_queue_time_seconds")),
        ("Waiting for a tokenizer worker", "s", quantiles(TOKENIZER + "queue_seconds")),
    ],
    "Throughput": [
        (
            "Tokens",
            "short",
            [rate("penstock_prompt_tokens_total", "prompt"), rate("penstock_generation_tokens_total", "generated")],
        ),
        (
            "Running and waiting",
            "short",
            [("sum(penstock_num_requests_running)", "running"), ("sum(penstock_num_requests_waiting)", "waiting")],
        ),
        (
            "Batch of a step",
            "short",
            [mean("penstock_iteration_sequences", "sequences"), mean("penstock_iteration_tokens_total", "tokens")],
        ),
        (
            "Requests ended",
            "reqps",
            [
                rate("penstock_request_success_total", "{{finished_reason}}", "finished_reason"),
                rate("penstock_requests_refused_total", "refused: {{reason}}", "reason"),
            ],
        ),
    ],
    "Assisted generation": [
        (
            "Draft tokens verified",
            "short",
            [
                rate(f"{DRAFTS}accepted_draft_tokens_total", "accepted"),
                rate(f"{DRAFTS}rejected_draft_tokens_total", "rejected"),
            ],
        ),
        (
            "Acceptance",
            "percentunit",
            [
                (
                    f"sum(rate({DRAFTS}accepted_draft_tokens_total[{RATE}])) / "
                    f"(sum(rate({DRAFTS}accepted_draft_tokens_total[{RATE}])) + "
                    f"sum(rate({DRAFTS}rejected_draft_tokens_total[{RATE}])))",
                    "accepted",
                )
            ],
        ),
        ("Draft model in a step", "s", quantiles("penstock_engine_draft_seconds")),
    ],
    "KV pool": [
        ("Usage", "percentunit", [("penstock_kv_cache_usage_perc", "{{instance}}")]),
        (
            "Prefix hit rate",
            "percentunit",
            [
                (
                    f"sum(rate(penstock_prefix_cache_hits_total[{RATE}])) / "
                    f"sum(rate(penstock_prefix_cache_queries_total[{RATE}]))",
                    "hits",
                )
            ],
        ),
        ("Preemptions", "ops", [rate("penstock_num_preemptions_total", "preemptions")]),
        ("Evictions of prefixes", "ops", [rate("penstock_prefix_cache_evictions_total", "blocks")]),
    ],
    "Prefixes on disk": [
        ("Prompt tokens read", "ops", [rate("penstock_kv_disk_hits_total", "tokens")]),
        (
            "Bytes read and written",
            "Bps",
            [rate(f"penstock_kv_disk_{way}_bytes_total", way) for way in ("read", "written")],
        ),
        (
            "Blocks not kept or not used",
            "ops",
            [
                rate(f"penstock_kv_disk_{kind}_blocks_total", kind)
                for kind in ("refused", "failed", "dropped", "evicted")
            ],
        ),
        ("Waiting to be written", "short", [("penstock_kv_disk_queued_blocks", "{{instance}}")]),
    ],
    "Adapters": [
        (
            "Known and in memory",
            "short",
            [("sum(penstock_adapters_known)", "known"), ("sum(penstock_adapters_loaded)", "in memory")],
        ),
        ("Requests running", "short", [("sum by (adapter) (penstock_adapter_requests_running)", "{{adapter}}")]),
        ("Memory", "bytes", [("sum(penstock_adapter_bytes)", "adapters")]),
        (
            "Loads and evictions",
            "ops",
            [
                rate("penstock_adapter_loads_total", "read"),
                rate("penstock_adapter_evictions_total", "evicted"),
                rate("penstock_adapter_load_failures_total", "failed: {{reason}}", "reason"),
                rate(ROUTER + "adapter_loads_total", "asked for by routers: {{outcome}}", "outcome"),
            ],
        ),
    ],
    "Routing and failure": [
        (
            "Up, ejected, hung",
            "short",
            [
                (f"sum({ROUTER}backend_up)", "backends"),
                (f"sum({ROUTER}tokenizer_up)", "tokenizer"),
                (f"sum({ROUTER}backend_ejected)", "backends ejected"),
                ("sum(penstock_engine_hung)", "engines that hang"),
                ("sum(penstock_engine_paused)", "engines in a pause"),
            ],
        ),
        (
            "Retries, moves, losses",
            "ops",
            [
                rate(ROUTER + "retries_total", "retries"),
                rate(ROUTER + "moves_total", "moves"),
                rate(ROUTER + "backend_losses_total", "backends lost"),
            ],
        ),
        (
            "Slow readers",
            "ops",
            [rate(ROUTER + "coalesced_deltas_total", "coalesced"), rate(ROUTER + "slow_readers_total", "cut off")],
        ),
        ("gRPC errors", "reqps", [(ERRORS, "{{grpc_service}} {{grpc_code}}")]),
    ],
    "Keys": [
        ("Requests by key", "reqps", [rate(ROUTER + "key_requests_total", "{{key}} {{status}}", "key, status")]),
        ("Tokens by key", "short", [rate(ROUTER + "key_tokens_total", "{{key}} {{kind}}", "key, kind")]),
        ("Refused by quotas", "reqps", [rate(ROUTER + "key_refusals_total", "{{key}}: {{quota}}", "key, quota")]),
        (
            "Requests at once, and what waits for the ledger",
            "short",
            [
                (f"sum by (key) ({ROUTER}key_requests_live)", "{{key}}"),
                (f"sum({ROUTER}key_ledger_waiting)", "ledger"),
            ],
        ),
    ],
    "HTTP gateway": [
        (
            "Requests by route and status",
            "reqps",
            [rate(GATEWAY + "http_requests_total", "{{route}} {{status}}", "route, status")],
        ),
        ("Time to first token", "s", quantiles(GATEWAY + "time_to_first_token_seconds")),
        (
            "At work and connected",
            "short",
            [
                (f"sum({GATEWAY}http_requests_in_flight)", "requests"),
                (f"sum({GATEWAY}http_connections)", "connections"),
                (f"sum({GATEWAY}http_anonymous_connections)", "connections without a token"),
                (f"sum({GATEWAY}kept_responses)", "kept responses"),
                (f"sum({GATEWAY}kept_conversations)", "kept conversations"),
                (f"sum({GATEWAY}background_responses_in_flight)", "responses in the background"),
            ],
        ),
        (
            "Readers that left or stopped",
            "ops",
            [rate(GATEWAY + "readers_left_total", "left"), rate(GATEWAY + "readers_stalled_total", "cut off")],
        ),
        ("Connections that made room", "ops", [rate(GATEWAY + "http_connections_evicted_total", "evicted")]),
        ("Bodies on their way or at work", "bytes", [(f"sum({GATEWAY}http_body_bytes)", "bytes")]),
    ],
}


_METRIC = re.compile(r"\b((?:penstock|grpc_server)_\w+)(?:\{([^}]*)\})?")


@cache
def by_model() -> frozenset[str]:
    """Names of metrics with the label `model_name`, as docs/reference/metrics.md tells, and their series."""
    page = (TARGET.parents[3] / "docs" / "reference" / "metrics.md").read_text()
    names = re.findall(r"^\| `(\w+)` \| \w+ \|[^|]*\bmodel_name\b", page, re.MULTILINE)
    return frozenset(name + part for name in names for part in ("", "_bucket", "_sum", "_count"))


def narrowed(expression: str) -> str:
    """Return the query for the chosen instances, and models where the metric has them."""

    def narrow(found: re.Match[str]) -> str:
        name, labels = found.group(1), [found.group(2)] if found.group(2) else []
        labels.append('instance=~"$instance"')
        if name in by_model():
            labels.append('model_name=~"$model"')
        return f"{name}{{{', '.join(labels)}}}"

    return _METRIC.sub(narrow, expression)


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """One variable with several values, all of them at first; they are read anew when the time range changes."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": f"variable-{name}"},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        # Series without the label count, too: an empty value matches.
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def panel(number: int, title: str, unit: str, queries: list[tuple[str, str]], x: int, y: int) -> dict[str, Any]:
    """One time series, a quarter of the width."""
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": DATASOURCE,
        "gridPos": {"h": 8, "w": 6, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "exemplar": "_bucket" in expression,
                "expr": narrowed(expression),
                "legendFormat": legend,
            }
            for i, (expression, legend) in enumerate(queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        for column, (name, unit, queries) in enumerate(row):
            panels.append(panel(len(panels) + 1, name, unit, queries, column * 6, y + 1))
        y += 9
    return {
        "uid": "penstock",
        "title": "Penstock",
        "schemaVersion": 41,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "tags": ["penstock"],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {"text": "default", "value": "default"},
                },
                variable("instance", "Process", 'label_values(up{job=~"penstock-.*"}, instance)'),
                variable("model", "Model", "label_values(penstock_engine_steps_total, model_name)"),
            ]
        },
        "panels": panels,
    }


def content() -> str:
    """Return the file's text."""
    return json.dumps(dashboard(), indent=2) + "\n"


def main() -> None:
    """Write the file."""
    TARGET.write_text(content(), encoding="utf-8")


if __name__ == "__main__":
    main()
