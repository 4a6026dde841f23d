"""The guard against slowdowns: this tree and a commit, in turns: W1, W2, W5, decode steps, engine, wire and gateway.

    python -m benchmarks guard HEAD~1
    python -m benchmarks guard main --mode full --out guard.json
    python -m benchmarks guard main --self
    python -m benchmarks guard main --plant 5 --only decode_steps

The commit is checked out into the cache folder, with its own benchmarks and C++ kernels built of its own sources, and
removed at the end. Each tree runs its own scripts, but for the gateway's; both are started, and one is held while the
other has its turn. A round is a fresh process of each tree, the order changes with every turn (ABBA). A ratio is the
tree's time over the base's in neighbouring turns: 1.02 is 2 % slower. A cell is slower when the median of its ratios is
beyond --bound; the exit status is then 1. It is noisy when more pairs could move that median by more than the bound.
Noisy cells get more rounds, in quick mode as far as its six minutes last.

`--self` compares the base with itself: all differences are noise then. `--plant 5` compares it with a copy of itself in
which every model step takes 5 % longer: a guard that works says slower.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks._arguments import at_least, names, refuse
from benchmarks._guard_benches import MODES, NAMES, QUICK_SECONDS, Setting, benches
from benchmarks._guard_plant import plant
from benchmarks._guard_report import conclusion, show
from benchmarks._guard_rounds import Guard, Limits
from benchmarks._guard_trees import Tree, checked_out, choose_kernels, find_commit, this_tree
from benchmarks._report import Report
from benchmarks.checkpoints import CACHE

MODEL = "qwen2.5-0.5b"


def checkpoint(tree: Tree) -> Path:
    """The random weights that all of both trees load, made on first use. Ends the process when they cannot be."""
    made = tree.python(*tree.script("checkpoints")[1:], MODEL)
    if made.returncode:
        refuse(f"the checkpoint could not be made: {made.stderr.strip().splitlines()[-1]}")
    return Path(made.stdout.strip().splitlines()[-1])


@contextlib.contextmanager
def both_trees(options: argparse.Namespace) -> Iterator[tuple[Tree, Tree]]:
    """The base and what is compared with it: this tree, the base again, or a copy of the base with what is planted."""
    commit = find_commit(ROOT, options.base)
    with contextlib.ExitStack() as exits:
        base = exits.enter_context(checked_out(ROOT, commit, options.cache))
        if options.self:
            yield base, Tree("base again", base.folder, base.commit)
        elif options.plant is not None:
            copy = exits.enter_context(checked_out(ROOT, commit, options.cache, "planted"))
            plant(copy.folder, options.plant)
            yield base, copy
        else:
            yield base, this_tree(ROOT)


def add_flags(made: argparse.ArgumentParser) -> None:
    """Add the flags."""
    made.add_argument("base", metavar="BASE", help="the commit to compare with")
    made.add_argument("--mode", choices=MODES, default="quick")
    made.add_argument("--bound", type=float, default=2.0, help="per cent by which no cell may be slower")
    made.add_argument("--only", type=names(NAMES, "benchmark"), default=list(NAMES), help=", ".join(NAMES))
    made.add_argument("--threads", type=at_least(1), default=len(os.sched_getaffinity(0)), help="of the engine")
    against = made.add_mutually_exclusive_group()
    against.add_argument("--self", action="store_true", help="compare the base with itself: how much is noise")
    against.add_argument("--plant", type=float, metavar="PERCENT", help="compare the base with a slower copy of itself")
    made.add_argument("--cache", type=Path, default=CACHE, help="where the commit is checked out")


def main(options: argparse.Namespace, report: Report) -> int:
    """Measure both trees; return the exit status."""
    if not options.base:
        refuse("which commit to compare with? make guard BASE=HEAD~1")
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} turns"),
        TextColumn("{task.fields[doing]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with both_trees(options) as (base, tree):
        with progress:
            guard = prepare(options, base, tree, progress)
            try:
                guard.measure()
            except (KeyboardInterrupt, SystemExit):
                # Half an hour of rounds is worth a table.
                if not guard.cells:
                    raise
                progress.console.print("stopped: the table has the rounds so far", markup=False)
        # Before the base is removed: a signal meanwhile costs no figure.
        return conclude(guard, options, report)


def conclude(guard: Guard, options: argparse.Namespace, report: Report) -> int:
    """Table, last line and JSON; the exit status."""
    bound = options.bound / 100
    show(guard.cells, bound, options.json)
    line, status = conclusion(guard.cells, guard.failures, guard.left_out, bound)
    print(line, file=sys.stderr, flush=True)
    settings = {name: getattr(options, name) for name in ("mode", "bound", "only", "threads", "self", "plant")}
    report.save({"settings": settings, **guard.facts(bound), "status": status})
    return status


def prepare(options: argparse.Namespace, base: Tree, tree: Tree, progress: Progress) -> Guard:
    """Both trees ready to be measured, and what was chosen of the benchmarks."""

    def say(line: str) -> None:
        progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        say(f"the machine is busy (load {load:.1f} on {cores} cores): ratios will be far apart")
    for one in (base, tree):
        one.check()
    say(f"{tree.name} {tree.commit} against base {base.commit}: checkpoint and kernels")
    setting = Setting(checkpoint(tree), options.threads)
    obstacle = choose_kernels([base, tree])
    say(obstacle or f"kernels: {base.kernels} of the base, {tree.kernels} of the tree")
    chosen = [bench for bench in benches(options.mode) if bench.name.split()[0] in options.only]
    left_out = {} if obstacle is None else {one.name: "needs C++ kernels" for one in chosen if one.needs_kernels}
    for bench in chosen:
        if not bench.is_ours and not all(
            (one.folder / "benchmarks" / f"{bench.script}.py").is_file() for one in (base, tree)
        ):
            left_out[bench.name] = f"the base has no {bench.script}.py"
    chosen = [bench for bench in chosen if bench.name not in left_out]
    seconds = QUICK_SECONDS if options.mode == "quick" else math.inf
    limits = Limits(options.bound / 100, seconds)
    return Guard(base, tree, setting, chosen, left_out, limits, progress)
