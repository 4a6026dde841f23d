"""The rounds of `guard`: a process of each tree, turn by turn, and more rounds where the figures are noisy."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks._guard_benches import Bench, Setting, Times
from benchmarks._guard_ratios import Cell, ratios
from benchmarks._guard_trees import Tree
from benchmarks._guard_turns import HeldProcess, TurnFailed

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Limits:
    """Bound on a ratio that is not noisy (0.02: two per cent), and on the seconds in which further rounds must end."""

    bound: float
    seconds: float


class Guard:
    """One comparison: its cells as they are measured, and what could not be."""

    def __init__(
        self,
        base: Tree,
        tree: Tree,
        setting: Setting,
        chosen: Sequence[Bench],
        left_out: dict[str, str],
        limits: Limits,
        progress: Progress,
    ) -> None:
        self._trees = (base, tree)
        self._setting = setting
        self._chosen = chosen
        self._limits = limits
        self._progress = progress
        self._started = time.monotonic()
        self._rounds: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._cells: dict[str, dict[str, Cell]] = {}
        # By benchmark: the reason why it failed, and the reason why it was left out.
        self.failures: dict[str, str] = {}
        self.left_out = left_out

    @property
    def cells(self) -> list[Cell]:
        """Cells of all benchmarks that were run."""
        return [cell for found in self._cells.values() for cell in found.values()]

    def measure(self) -> None:
        """All rounds of each benchmark, then more of those that are noisy."""
        for bench in self._chosen:
            for _ in range(bench.effort.rounds):
                self._round(bench)
        while again := [bench for bench in self._chosen if self._needs_more(bench)]:
            for bench in again:
                # Again: the time may be over.
                if self._needs_more(bench):
                    self._round(bench)

    def facts(self, bound: float) -> dict[str, Any]:
        """Return the facts of all cells for JSON."""
        return {
            "trees": {tree.name: {"commit": tree.commit, "kernels": tree.kernels} for tree in self._trees},
            "cells": [cell.facts(bound) for cell in self.cells],
            "failures": self.failures,
            "left_out": self.left_out,
        }

    def _needs_more(self, bench: Bench) -> bool:
        if bench.name in self.failures or self._rounds[bench.name] >= bench.effort.most_rounds:
            return False
        if time.monotonic() - self._started + self._seconds[bench.name] > self._limits.seconds:
            return False
        return any(cell.is_noisy(self._limits.bound) for cell in self._cells[bench.name].values())

    def _round(self, bench: Bench) -> None:
        if bench.name in self.failures:
            return
        number = self._rounds.get(bench.name, 0)
        started = time.monotonic()
        try:
            base, tree = self._turns(bench, number)
            self._take(bench, base, tree)
        except (TurnFailed, ValueError, KeyError, OSError) as error:
            self.failures[bench.name] = f"no {error} in its JSON" if isinstance(error, KeyError) else str(error)
            self._say(f"{bench.name}: {self.failures[bench.name]}")
            return
        self._rounds[bench.name] = number + 1
        self._seconds[bench.name] = time.monotonic() - started

    def _turns(self, bench: Bench, number: int) -> tuple[Times, Times]:
        """One round: a process of each tree from start to end. Times of the base and of the tree."""
        label = f"{bench.name}: round {number + 1}"
        task = self._progress.add_task(label, total=2 * bench.turns + 2, doing="")
        with contextlib.ExitStack() as exits:
            exits.callback(self._progress.remove_task, task)
            folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-guard-"))
            files = [Path(folder) / f"{tree.name}.json" for tree in self._trees]
            processes = []
            for tree, file in zip(self._trees, files, strict=True):
                flags = bench.flags(self._setting, bench.effort.cycles, file)
                runner = tree
                if bench.is_ours:
                    runner, flags = Tree("ours", _ROOT, ""), [*flags, "--tree", str(tree.folder)]
                command = runner.script(bench.script, *flags)
                processes.append(HeldProcess(command, runner.environment(), runner.folder, bench.turn_ends))
                exits.callback(processes[-1].stop)
            for turn in range(bench.turns):
                order = (0, 1) if bench.starts_with_base(number, turn) else (1, 0)
                for which in order:
                    self._progress.update(task, doing=self._trees[which].name)
                    processes[which].turn()
                    self._progress.advance(task)
            for process in processes:
                process.finish()
                self._progress.advance(task)
            base, compared = (bench.times(json.loads(file.read_text())) for file in files)
        return base, compared

    def _take(self, bench: Bench, base: Times, tree: Times) -> None:
        if base.keys() != tree.keys():
            raise ValueError(f"cells of one tree alone: {', '.join(sorted(base.keys() ^ tree.keys()))}")
        for name, seconds in tree.items():
            if min(seconds) > bench.most_seconds:
                raise ValueError(f"{name}: {min(seconds):.2f} s, and at most {bench.most_seconds:g} s are allowed")
        found = {name: ratios(tree[name], base[name]) for name in base}
        cells = self._cells.setdefault(bench.name, {})
        for name, values in found.items():
            cells.setdefault(name, Cell(name, [])).rounds.append(values)
        worst = max(cells.values(), key=lambda cell: cell.median)
        self._say(f"{bench.name}: round {len(worst.rounds)}, at most {worst.median:.3f} ({worst.name})")

    def _say(self, line: str) -> None:
        self._progress.console.print(
            f"{time.strftime('%H:%M:%S')} {line}", markup=False, highlight=False, soft_wrap=True
        )
