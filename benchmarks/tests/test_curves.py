"""The curves of the routers' choice: a row for each number, the same counts in every run, and a picture of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main

SMALL = ["router_curves", "--backends", "2,40", "--routers", "1,3", "--requests", "200", "--rounds", "1"]


def curves(path: Path, *flags: str) -> dict[str, list[dict[str, float]]]:
    assert main([*SMALL, "--json", str(path), *flags]) == 0
    found: dict[str, list[dict[str, float]]] = json.loads(path.read_text())
    return found


def test_rows_are_the_same_in_every_run_and_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first = curves(tmp_path / "first.json", "--plot", str(tmp_path / "curves.svg"))
    second = curves(tmp_path / "second.json")
    assert [row["backends"] for row in first["backends"]] == [2, 40]
    assert [(row["routers"], row["load"], row["told"]) for row in first["routers"]] == [
        (routers, load, told) for load in (0.8, 1.3) for told in (False, True) for routers in (1, 3)
    ]
    assert [(row["routers"], row["adapters"]) for row in first["adapters"]] == [(1, 100), (3, 100)]
    # One router knows its own loads; others hear of them later.
    assert [row["needless_loads"] > 0 for row in first["adapters"]] == [False, True]
    for part in ("backends", "routers", "adapters"):
        for one, other in zip(first[part], second[part], strict=True):
            assert {**one, "choice_us": 0} == {**other, "choice_us": 0}
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_a_plot_of_another_kind_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, "--plot", str(tmp_path / "curves.gif")])
    assert ended.value.code == 2
