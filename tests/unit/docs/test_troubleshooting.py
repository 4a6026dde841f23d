"""The page of troubleshooting quotes messages that the services write, reasons that exist, and flags of commands."""

from __future__ import annotations

import re

from factories.source_tree import PACKAGE, ROOT
from penstock.common.error_reasons import errors_markdown

PAGE = (ROOT / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8")
STARTS = PAGE.split("## A start ends")[1].split("## ")[0]


def test_messages_of_a_start_are_in_the_code() -> None:
    rows = re.findall(r"^\| (`.*?) \| ", STARTS, re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) >= 10
    # Literals may be broken over lines.
    code = " ".join(re.sub(r'"\s+f?"', "", path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    assert [text for text in quoted if text not in code] == []


def test_reasons_exist() -> None:
    known = set(re.findall(r"^\| `([A-Z_]+)` \|", errors_markdown(), re.MULTILINE))
    assert set(re.findall(r"`([A-Z]+_[A-Z_]+)`", PAGE)) <= known
