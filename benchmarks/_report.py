"""What every benchmark writes beside its figures: commit, machine, versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def environment() -> dict[str, Any]:
    """Commit (with + when the tree is dirty), CPU, cores and Python."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    return {"commit": commit, "cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()}


def percentile(values: list[float], share: float) -> float:
    """The smallest value with at least `share` of the values at or below it. Raises ValueError when there are none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


def write(name: str, results: dict[str, Any], out: Path | None) -> None:
    """Print the results as JSON and write them to `out` when given."""
    text = json.dumps({"benchmark": name, "environment": environment(), **results}, indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
