"""Sections of CHANGELOG.md: the one of the next release, and its end."""

from __future__ import annotations

import re
from datetime import date

_UNRELEASED = "## Unreleased\n"
_HEADING = re.compile(r"^## ", re.MULTILINE)


def open_section(text: str) -> str:
    """Return what the next release changes. Raises ValueError without a section, or with an empty one."""
    _, found, rest = text.partition(_UNRELEASED)
    heading = _HEADING.search(rest)
    section = rest[: heading.start() if heading else None].strip()
    if not found or not section:
        raise ValueError(f"CHANGELOG.md has nothing below {_UNRELEASED.strip()!r}: there is nothing to release")
    return section


def close_section(text: str, version: str, day: date) -> str:
    """Return the text with that section under the version and the day, and an empty one above it."""
    open_section(text)
    return text.replace(_UNRELEASED, f"{_UNRELEASED}\n## {version} ({day.isoformat()})\n", 1)
