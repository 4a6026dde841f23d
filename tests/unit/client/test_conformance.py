"""The Python client passes the conformance vectors; other languages do in tests/e2e/test_sdks.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tools import make_conformance

ROOT = Path(__file__).resolve().parents[3]
VECTORS = json.loads(make_conformance.TARGET.read_text(encoding="utf-8"))["vectors"]


def program() -> Any:
    """The program that tests/e2e runs, as a module."""
    path = ROOT / "tests" / "clients" / "generated" / "main.py"
    spec = importlib.util.spec_from_file_location("conformance_client", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_that_of_its_tool() -> None:
    assert make_conformance.TARGET.read_text(encoding="utf-8") == make_conformance.content()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_the_client_makes_of_a_vector_what_is_expected(vector: dict[str, Any]) -> None:
    seen = getattr(program(), vector["kind"])([bytes.fromhex(message) for message in vector["messages"]])
    assert {key: value for key, value in seen.items() if value} == {
        key: value for key, value in vector["expect"].items() if value
    }
