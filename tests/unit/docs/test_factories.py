"""tests/factories/README.md lists every factory."""

from __future__ import annotations

import re

from factories.source_tree import ROOT

FACTORIES = ROOT / "tests" / "factories"


def test_the_index_is_whole() -> None:
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", (FACTORIES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(path.relative_to(FACTORIES).as_posix() for path in FACTORIES.rglob("*.py"))
