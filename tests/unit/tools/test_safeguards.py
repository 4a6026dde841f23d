"""The table of safeguards is true: what would be removed is there, once, and so are the tests."""

from __future__ import annotations

import ast

import pytest
from factories.source_tree import ROOT

from tools.remove_safeguards import without
from tools.safeguards import SAFEGUARDS, Safeguard


def test_there_are_enough_of_them_and_each_has_a_name() -> None:
    assert len({one.name for one in SAFEGUARDS}) == len(SAFEGUARDS) >= 20


@pytest.mark.parametrize("safeguard", SAFEGUARDS, ids=lambda one: str(one.name))
def test_a_safeguard_can_be_removed_and_has_a_test(safeguard: Safeguard) -> None:
    source = (ROOT / safeguard.file).read_text(encoding="utf-8")
    assert without(safeguard, source) != source
    file, _, name = safeguard.test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    tests = {one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert name.partition("[")[0] in tests


@pytest.mark.parametrize("source", ["a = 1\n", "a = f(b)\na = f(b)\n"], ids=["gone", "twice"])
def test_a_text_that_is_not_there_once_is_an_error(source: str) -> None:
    safeguard = Safeguard("one", "some.py", "f(b)", "b", "tests/some.py::test_some")
    with pytest.raises(ValueError, match=r"times in some\.py"):
        without(safeguard, source)
    assert without(safeguard, "a = f(b)\n") == "a = b\n"
