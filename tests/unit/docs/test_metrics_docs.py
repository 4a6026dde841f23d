"""The metrics page and the dashboard say what the services really expose."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tools import make_dashboard, metrics_table

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_up_to_date() -> None:
    assert metrics_table.TARGET.read_text(encoding="utf-8") == metrics_table.page(), "run python tools/metrics_table.py"


def test_the_dashboard_is_up_to_date() -> None:
    written = make_dashboard.TARGET.read_text(encoding="utf-8")
    assert written == make_dashboard.content(), "run python tools/make_dashboard.py"


def exposed() -> set[str]:
    """Names as Prometheus stores them: histograms have three series."""
    names = set()
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for name, kind in re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


def test_every_query_of_the_dashboard_names_a_metric_that_exists() -> None:
    """Each metric-like word in each expression."""
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "penstock.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    used = {name for query in queries for name in re.findall(r"\b(?:penstock|grpc_server)_\w+", query)}
    assert len(queries) > 20
    assert used - exposed() == set()
