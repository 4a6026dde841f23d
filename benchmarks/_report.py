"""Facts that every benchmark writes beside its figures: commit, machine, versions, time."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def environment() -> dict[str, Any]:
    """Commit (with + when the tree is dirty), CPU, the cores that this process may use, Python and local time."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    return {
        "commit": commit,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }


def percentile(values: list[float], share: float) -> float:
    """The smallest value with at least `share` of the values at or below it. Raises ValueError when there are none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


STDOUT = Path("-")


def write(name: str, results: dict[str, Any], out: Path | None) -> None:
    """Print the results as JSON and write them to `out` when given."""
    save(name, results, STDOUT)
    if out is not None and out != STDOUT:
        save(name, results, out)


def save(name: str, results: dict[str, Any], out: Path | None) -> None:
    """Write the results as JSON to `out`: standard output for `-`, nowhere for None. Paths in them become texts."""
    if out is None:
        return
    text = json.dumps({"benchmark": name, "environment": environment(), **results}, indent=2, default=_plain)
    if out == STDOUT:
        print(text)
    else:
        out.write_text(text + "\n")


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")


class Table:
    """A Markdown table, line by line as its rows come; on stderr where stdout is for JSON (`out` is `-`)."""

    def __init__(self, header: Sequence[str], out: Path | None) -> None:
        self._file = sys.stderr if out == STDOUT else sys.stdout
        self.row(*header)
        self.row(*["---"] * len(header))

    def row(self, *cells: object) -> None:
        """Print a row."""
        self.line("| " + " | ".join(map(str, cells)) + " |")

    def line(self, text: str) -> None:
        """Print a row that is one already."""
        print(text, file=self._file, flush=True)
