"""The contract in docs/guide/reliability.md: twenty points, each held by tests that exist."""

from __future__ import annotations

import ast
import re

import pytest
from factories.source_tree import ROOT

POINTS = 20
_ROW = re.compile(r"^\| (\d+) \| .+ \| (.+) \|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> dict[int, list[tuple[str, str]]]:
    """Read the tests of each point: file and function."""
    page = (ROOT / "docs" / "guide" / "reliability.md").read_text(encoding="utf-8")
    contract = page.partition("## The contract")[2].partition("\n## ")[0]
    return {int(number): _TEST.findall(tests) for number, tests in _ROW.findall(contract)}


def test_every_point_is_there() -> None:
    assert list(rows()) == list(range(1, POINTS + 1))


@pytest.mark.parametrize("point", range(1, POINTS + 1))
def test_a_points_tests_exist(point: int) -> None:
    tests = rows()[point]
    assert tests, "no test holds it"
    for file, name in tests:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{file} has no {name}"
