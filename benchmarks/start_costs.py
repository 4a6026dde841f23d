"""Cost of a start: seconds of the clock and of the processor, and memory beyond a process without a model.

    python -m benchmarks start_costs smollm2-135m.gguf gemma3-270m.gguf --rounds 3

Each start is a `penstock serve generation` with default flags, up to its first greedy answer. The bare process is the
same program with the same imports and ports, without a model (`--empty`). A cache folder of the benchmark's own begins
with the compiled kernels alone. So a model's first start makes what its later ones find there, and the bare process,
which comes first, leaves the bytecode, as an installation has it.

Figures are medians of the rounds, of first starts the only one. The processor's seconds are of all processes of a
start, also of those that have ended. Memory is private: pages of libraries and files that processes share are not
in it. `weights` are as packed, `KV` the pages of the pool that were written (it is larger, and untouched), `rest` all
else beyond the bare process. Peak is the largest resident size, with the libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.common.environment import cache_folder

from benchmarks._arguments import at_least
from benchmarks._greedy_answer import ids_of
from benchmarks._report import Report

_MIB = 2**20
_LIBRARIES = "penstock_native-*"
_READY = re.compile(r"^READY .*gRPC (\S+)")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ", re.MULTILINE)
# Advice on a pool's pages may cut the first off its mapping. Blocks for named sequences make that larger.
_SOME_PAGES = 1 << 20
_COLUMNS = (
    *("start", "READY, s", "first answer, s", "processor to READY, s", "to the answer, s"),
    *("private MiB", "beyond bare MiB", "weights", "KV", "rest", "peak MiB"),
)


@dataclass
class Cost:
    """Costs of one start, or medians of several. Seconds and MiB; memory after the first answer."""

    ready: float = 0.0
    answer: float = 0.0
    ready_processor: float = 0.0
    answer_processor: float = 0.0
    private: float = 0.0
    weights: float = 0.0
    kv: float = 0.0
    peak: float = 0.0


def private_memory(smaps: str) -> float:
    """Return the private MiB of a process by its smaps."""
    return sum(map(int, re.findall(r"^Private_(?:Clean|Dirty): +(\d+) kB", smaps, re.MULTILINE))) / 1024


def pool_memory(smaps: str, num_bytes: int) -> float:
    """Return the written MiB of a pool of `num_bytes`: of the largest mapping; 0.0 where none is so large."""
    places = [match.start() for match in _MAPPING.finditer(smaps)]
    found = [
        dict(re.findall(r"^(Size|Rss): +(\d+) kB", smaps[begin:end], re.MULTILINE))
        for begin, end in zip(places, [*places[1:], len(smaps)], strict=True)
    ]
    largest = max(found, key=lambda one: int(one["Size"]))
    return int(largest["Rss"]) / 1024 if int(largest["Size"]) * 1024 > num_bytes - _SOME_PAGES else 0.0


def processor_seconds(pid: int) -> float:
    """Return seconds of the processor of a process and of its children that have ended."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, ticks[11:15])) / os.sysconf("SC_CLK_TCK")


def own_cache(folder: Path) -> Path:
    """Make a cache folder that has the compiled kernels of this user's, and nothing else."""
    for library in Path(cache_folder()).glob(f"*/{_LIBRARIES}"):
        place = folder / "penstock" / library.parent.name
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, place)
    return folder


def start(model: Path | None, folder: Path) -> Cost:
    """Start, answer once, and stop. `model` None: without one. Raises SystemExit where it does not start."""
    given = ["--empty"] if model is None else [str(model)]
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "generation", *given]
    command += ["--port", "0", "--metrics-port", "0", "--log-format", "json", "--parent-pid", str(os.getpid())]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    cost, began = Cost(), time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            address, loaded = _follow(process)
            cost.ready = time.perf_counter() - began
            cost.ready_processor = processor_seconds(process.pid)
            if model is not None:
                ids_of(address)
            cost.answer = time.perf_counter() - began
            cost.answer_processor = processor_seconds(process.pid)
            smaps = Path(f"/proc/{process.pid}/smaps").read_text()
            cost.private = private_memory(smaps)
            cost.weights = loaded.get("weights_bytes", 0) / _MIB
            cost.kv = pool_memory(smaps, loaded["kv_bytes"]) if loaded else 0.0
            status = Path(f"/proc/{process.pid}/status").read_text()
            (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
            cost.peak = int(peak) / 1024
        finally:
            process.terminate()
    return cost


def _follow(process: subprocess.Popen[str]) -> tuple[str, dict[str, Any]]:
    """Return the address of a service that is ready, and the record of its load."""
    assert process.stdout is not None
    lines: list[str] = []
    loaded: dict[str, Any] = {}
    for line in process.stdout:
        lines.append(line)
        if (ready := _READY.match(line)) is not None:
            return ready[1], loaded
        record = json.loads(line) if line.startswith("{") else {}
        if record.get("event") == "loaded":
            loaded = record
    raise SystemExit("the service ended before it was ready:\n" + "".join(lines[-20:]))


def median(costs: Sequence[Cost]) -> Cost:
    """Return the median of every figure."""
    every = [asdict(one) for one in costs]
    return Cost(**{name: statistics.median(one[name] for one in every) for name in every[0]})


def row(name: str, cost: Cost, bare: Cost) -> list[object]:
    """Cells of a row, by _COLUMNS."""
    beyond = cost.private - bare.private
    seconds = (cost.ready, cost.answer, cost.ready_processor, cost.answer_processor)
    memory = (cost.private, beyond, cost.weights, cost.kv, beyond - cost.weights - cost.kv, cost.peak)
    return [name, *(f"{one:.2f}" for one in seconds), *(f"{one:.0f}" for one in memory)]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files and folders")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="later starts of each, in turns")


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    with tempfile.TemporaryDirectory(prefix="penstock-starts-") as scratch:
        folder = own_cache(Path(scratch))
        start(None, folder)
        first = {model: start(model, folder) for model in options.models}
        rounds: dict[Path | None, list[Cost]] = {model: [] for model in (None, *options.models)}
        for _ in range(options.rounds):
            for model, found in rounds.items():
                found.append(start(model, folder))
    later = {model: median(found) for model, found in rounds.items()}
    bare = later.pop(None)
    table = report.table(_COLUMNS)
    table.row(*row("bare", bare, bare))
    for model in options.models:
        table.row(*row(f"{model.name}, first", first[model], bare))
        table.row(*row(f"{model.name}, later", later[model], bare))
    cells = {
        "bare": asdict(bare),
        "first": {str(model): asdict(one) for model, one in first.items()},
        "later": {str(model): asdict(one) for model, one in later.items()},
    }
    report.save({"settings": report.settings, "cells": cells})
