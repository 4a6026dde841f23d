"""docs/generation-config.md says of every field what the code does with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from penstock.generation.options import BEAM_ONLY, LATER
from penstock.v1 import config_pb2

PAGE = (Path(__file__).parents[2] / "docs" / "generation-config.md").read_text(encoding="utf-8")
SECTIONS: dict[str, Any] = {
    "config": config_pb2.GenerationConfig,
    "stop": config_pb2.StopConfig,
    "output": config_pb2.OutputConfig,
}


def rows(section: str) -> dict[str, str]:
    """Field -> what this release does, of one section's table."""
    text = PAGE.split(f"## `{section}`")[1].split("\n## ")[0]
    return {found[1]: found[2] for found in re.finditer(r"^\| `(\w+)` \|[^|]*\| ([^|]+?) \|", text, re.MULTILINE)}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_has_its_row(section: str) -> None:
    assert list(rows(section)) == [field.name for field in SECTIONS[section].DESCRIPTOR.fields]


def test_the_page_refuses_what_the_code_refuses() -> None:
    table = rows("config")
    assert {name for name, what in table.items() if what == "refused"} == set(LATER)
    assert {name for name, what in table.items() if what == "warned about"} == set(BEAM_ONLY)
