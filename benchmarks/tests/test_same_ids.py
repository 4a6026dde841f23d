"""A run of `same_ids` that was stopped goes on with the cells that it has."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks._report import Report
from benchmarks.same_ids import rows_of

ROW = {"model": "smollm2-135m", "format": "int8", "comparisons": 100, "different": 0}


def options(path: Path, **changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"requests": 100, "tokens": 24, "json": path} | changed)


def test_rows_of_the_same_requests_at_the_same_commit_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert rows_of(path, options(path)) == {}
    assert rows_of(None, options(path)) == {}
    report = Report("same_ids", options(path))
    report.save_so_far({**report.settings, "rows": [ROW]})
    assert rows_of(path, options(path)) == {("smollm2-135m", "int8"): ROW}
    assert rows_of(path, options(path, requests=50)) == {}
    assert rows_of(path, options(path, tokens=12)) == {}
    found = json.loads(path.read_text())
    found["environment"]["commit"] = "another"
    path.write_text(json.dumps(found))
    assert rows_of(path, options(path)) == {}


def test_a_file_that_is_no_json_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("the user's")
    with pytest.raises(SystemExit):
        rows_of(path, options(path))
    assert str(path) in capsys.readouterr().err


def test_standard_output_gets_the_last_results_alone(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("same_ids", options(Path("-")))
    report.save_so_far({"rows": []})
    assert not capsys.readouterr().out
    report.save({"rows": [ROW]})
    assert json.loads(capsys.readouterr().out)["rows"] == [ROW]
