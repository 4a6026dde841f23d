"""The metrics page and the dashboard say what the services really expose."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("tool", ["metrics_table.py", "make_dashboard.py"])
def test_generated_files_are_up_to_date(tool: str) -> None:
    """The tools would write what is there."""
    done = subprocess.run([sys.executable, ROOT / "tools" / tool, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run python tools/{tool}\n{done.stderr}"


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
