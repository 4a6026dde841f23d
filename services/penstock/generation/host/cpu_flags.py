"""Flags of this CPU as Linux lists them. No torch: a start asks before it is imported."""

from __future__ import annotations

import re
from pathlib import Path


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str] | None:
    """Return the flags by Linux's names; None where it tells none."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else frozenset(found[1].split())
