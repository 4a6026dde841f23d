"""The cost of a whole router: a row for each number of backends, from real processes, and a picture of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main


def test_a_router_before_some_backends_has_a_row_and_a_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = ["--backends", "1,3", "--requests", "16", "--rounds", "1", "--tokens", "3", "--rest-seconds", "0.1"]
    out, picture = tmp_path / "out.json", tmp_path / "load.svg"
    assert main(["router_load", *flags, "--json", str(out), "--plot", str(picture)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["backends"] for row in rows] == [1, 3]
    for row in rows:
        assert min(row[name] for name in ("up_cpu_s", "memory_mb", "request_cpu_us", "adapter_request_cpu_us")) > 0
    assert "<svg" in picture.read_text()
