"""Rules of Prometheus: promtool takes them, they name metrics that exist, and each alert has its runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
GUIDE = ROOT / "docs" / "guide" / "observability.md"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not here"
)


def promtool(*arguments: str | Path) -> None:
    """Run it. Fails with its words."""
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    assert len(RULES) == 2
    promtool("check", "rules", *RULES)


@needs_promtool
def test_the_rules_do_what_their_unit_tests_say() -> None:
    promtool("test", "rules", PROMETHEUS / "rules_test.yml")


@needs_promtool
@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus.tls.yml"])
def test_promtool_takes_the_configurations(name: str) -> None:
    promtool("check", "config", "--syntax-only", PROMETHEUS / name)


@needs_promtool
def test_promtool_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "penstock.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    # Grafana puts these in.
    texts = [
        query.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$model", ".*") for query in queries
    ]
    rules = [{"record": f"panel:query{place}", "expr": text} for place, text in enumerate(texts)]
    path = tmp_path / "queries.yml"
    # JSON is YAML.
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", path)


def test_every_query_of_the_dashboard_follows_its_variables() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "penstock.json").read_text())
    assert [one["name"] for one in dashboard["templating"]["list"]] == ["datasource", "instance", "model"]
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    for query in queries:
        series = re.findall(r"\b(?:penstock|grpc_server)_\w+(?:\{[^}]*\})?", query)
        assert all('instance=~"$instance"' in one for one in series), query
        of_models = [one for one in series if not re.match(r"penstock_(router|tokenizer|gateway)_|grpc_", one)]
        assert all('model_name=~"$model"' in one for one in of_models), query


def test_rules_name_metrics_that_exist() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    known = {
        name + part
        for name in re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
        for part in ("", "_bucket", "_sum", "_count")
    }
    text = "\n".join(path.read_text() for path in RULES)
    assert not set(re.findall(r"\bpenstock_\w+", text)) - known
    recorded = set(re.findall(r"^ *- record: (\S+)", text, re.MULTILINE))
    assert not set(re.findall(r"\bpenstock:[\w:]+", text)) - recorded


def test_each_alert_has_its_runbook_and_each_runbook_an_alert() -> None:
    text = (PROMETHEUS / "rules" / "alerts.yml").read_text()
    alerts = re.findall(r"^ *- alert: (\w+)", text, re.MULTILINE)
    links = re.findall(r"runbook: docs/guide/observability\.md#(\w+)", text)
    assert links == [name.lower() for name in alerts]
    assert re.findall(r"^### (\w+)$", GUIDE.read_text(), re.MULTILINE) == alerts
