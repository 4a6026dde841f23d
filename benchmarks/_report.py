"""The report of a benchmark: a table as its rows come, and JSON with commit, machine, versions and time."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Report:
    """The table and the JSON of one run; `options` are its flags."""

    name: str
    options: argparse.Namespace

    @property
    def settings(self) -> dict[str, Any]:
        """The flags as JSON has them: all but the file that it goes to."""
        return {name: value for name, value in vars(self.options).items() if name not in ("json", "run")}

    def table(self, header: Sequence[str]) -> Table:
        """Begin a table."""
        return Table(header, self.options.json)

    def save(self, results: dict[str, Any]) -> None:
        """Write the results as JSON to the file of `--json`, where there is one."""
        save(self.name, results, self.options.json)

    def save_so_far(self, results: dict[str, Any]) -> None:
        """Save the results of a run that goes on: standard output gets the last ones alone."""
        if self.options.json != STDOUT:
            self.save(results)

    def write(self, results: dict[str, Any]) -> None:
        """Print the results as JSON, and save them."""
        save(self.name, results, STDOUT)
        if self.options.json != STDOUT:
            self.save(results)


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
