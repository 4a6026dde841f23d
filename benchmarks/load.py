"""Time until a generation process is ready, by stages, and the most memory that it takes.

    python -m benchmarks load
    python -m benchmarks load --models qwen2.5-0.5b DIR --quantization none int8 --rounds 3 --cold --json load.json

A folder that `penstock pack` wrote is a model like others, started as it is: --quantization does not concern it.

Each start is a process of its own, in turns over models and formats. Beside each start the model's files are read
from end to end, in the same state of the page cache (--cold: dropped before), so that what a start takes beyond reading
is seen. Memory is what /proc says of the process, sampled every 10 ms; beside it stands that of a process that has
imported torch only.

Memory that a virtual machine has not used before is dear for the process that asks first. So a process of its own
writes as much memory before each start and ends: `first_touch` is the longest that this took, `touch` the shortest.
Some hosts take freed memory back after seconds: --idle 10 shows starts after that, without it most memory is at hand.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.generation.weights.files import PACKED_FILE, is_packed

from benchmarks._arguments import at_least
from benchmarks._report import Report
from benchmarks.checkpoints import CACHE, SHAPES, resolve

# Model, --quantization, and whether the weights' memory is taken early, and the embedding's table mapped ("on", "off").
Cell = tuple[Path, str, str, str]
_FIELDS = ("VmRSS", "RssAnon", "RssFile")
_COLUMNS = (
    *("model", "quantization", "prefault", "map embeddings", "ready s", "median s", "processor s"),
    *("reading s", "beyond reading s", "touch s", "weights MiB", "peak MiB", "of it anonymous", "bound MiB"),
)
_MIB = 2**20
# Memory that a start may take beyond weights and pool, as a share of the weights.
_BOUND = 1.15


def memory(pid: int) -> dict[str, int]:
    """Bytes by /proc/PID/status: resident, of it anonymous and mapped from files (libraries, the checkpoint)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return {name: int(value) * 1024 for name, value in re.findall(r"(\w+):\s+(\d+) kB", status) if name in _FIELDS}


def bare() -> dict[str, int]:
    """Memory of a process that has imported torch and nothing else."""
    code = "import torch, sys; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        found = memory(process.pid)
        process.stdin.close()
    return found


def files(model: Path) -> list[Path]:
    """The weights of a model."""
    return [model / PACKED_FILE] if is_packed(model) else sorted(model.glob("*.safetensors"))


def drop(model: Path) -> None:
    """Out of the page cache."""
    for path in files(model):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(model: Path) -> float:
    """Seconds to read every byte once."""
    buffer, began = bytearray(_MIB), time.perf_counter()
    for path in files(model):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def touch(num_bytes: int) -> float:
    """Seconds to write so much fresh memory, in large pages, in a process of its own."""
    code = (
        "import mmap, sys, time; began = time.perf_counter(); memory = mmap.mmap(-1, int(sys.argv[1]));"
        "memory.madvise(mmap.MADV_HUGEPAGE); chunk = bytes(1 << 20);"
        "[memory.write(chunk) for _ in range(len(memory) >> 20)]; print(time.perf_counter() - began)"
    )
    return float(subprocess.check_output([sys.executable, "-c", code, str(num_bytes)]))


@dataclass
class Start:
    """One start, as seen from outside."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    weights: int = 0
    pool: int = 0


def start(cell: Cell, arguments: argparse.Namespace) -> Start:
    """Start, wait until it is ready, stop."""
    model, quantization, prefault, mapped = cell
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "generation", "--model", str(model)]
    command += ["--quantization", quantization, "--kv-memory", arguments.kv_memory, "--kernels", arguments.kernels]
    command += ["--prefault-weights" if prefault == "on" else "--no-prefault-weights"]
    command += ["--map-embeddings" if mapped == "on" else "--no-map-embeddings"]
    command += ["--port", "0", "--metrics-port", "0", "--log-format", "json", "--parent-pid", str(os.getpid())]
    result, began, done = Start(), time.perf_counter(), threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        sampler = threading.Thread(target=_sample, args=(process.pid, result.peak, done))
        sampler.start()
        try:
            _follow(process, result, began)
            result.ready = memory(process.pid)
            ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            result.cpu_seconds = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
        finally:
            done.set()
            sampler.join()
            process.terminate()
    return result


def _sample(pid: int, peak: dict[str, int], done: threading.Event) -> None:
    while not done.wait(0.01):
        for name, value in memory(pid).items():
            peak[name] = max(peak.get(name, 0), value)


def _follow(process: subprocess.Popen[str], result: Start, began: float) -> None:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        now = time.perf_counter() - began
        if line.startswith("READY"):
            result.seconds["ready"] = now
            return
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("event") == "listening":
            result.seconds["imports"] = now
        elif event.get("event") == "loaded":
            result.seconds |= event["seconds"]
            result.weights, result.pool = event["weights_bytes"], event["kv_bytes"]
    raise SystemExit("the service ended before it was ready:\n" + "".join(lines[-20:]))


def row(cell: Cell, starts: list[Start], reads: list[float], touches: list[float]) -> dict[str, Any]:
    """The fastest start of all rounds, and the largest peak."""
    fastest = min(starts, key=lambda one: one.seconds["ready"])
    peak = {name: max(one.peak[name] for one in starts) / _MIB for name in _FIELDS}
    bound = (fastest.weights * _BOUND + fastest.pool) / _MIB
    return {
        "model": cell[0].name,
        "quantization": cell[1],
        "prefault": cell[2],
        "map_embeddings": cell[3],
        "seconds": {name: round(value, 2) for name, value in fastest.seconds.items()},
        "ready_median": round(statistics.median(one.seconds["ready"] for one in starts), 2),
        "cpu_seconds": round(min(one.cpu_seconds for one in starts), 2),
        "reading": round(min(reads), 2),
        "beyond_reading": round(fastest.seconds["ready"] - min(reads), 2),
        "touch": round(min(touches), 2),
        "first_touch": round(max(touches), 2),
        "weights_mib": round(fastest.weights / _MIB),
        "pool_mib": round(fastest.pool / _MIB),
        "bound_mib": round(bound),
        "peak_mib": {name: round(value) for name, value in peak.items()},
        "ready_mib": {name: round(fastest.ready[name] / _MIB) for name in _FIELDS},
    }


def shown(row: dict[str, Any]) -> list[object]:
    """A row's cells, by _COLUMNS."""
    return [
        *(row[name] for name in ("model", "quantization", "prefault", "map_embeddings")),
        *(row["seconds"]["ready"], row["ready_median"], row["cpu_seconds"], row["reading"], row["beyond_reading"]),
        f"{row['touch']} to {row['first_touch']}",
        *(row["weights_mib"], row["peak_mib"]["VmRSS"], row["peak_mib"]["RssAnon"], row["bound_mib"]),
    ]


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All models and formats, in turns."""
    cells: list[Cell] = []
    for model in arguments.models:
        kinds = ["auto"] if is_packed(model) else arguments.quantization
        cells += itertools.product([model], kinds, arguments.prefault, arguments.map_embeddings)
    starts: dict[Cell, list[Start]] = {cell: [] for cell in cells}
    reads: dict[Cell, list[float]] = {cell: [] for cell in cells}
    touches: dict[Cell, list[float]] = {cell: [] for cell in cells}
    for _ in range(arguments.rounds):
        for cell in cells:
            touches[cell].append(touch(sum(path.stat().st_size for path in files(cell[0]))))
            _prepare(cell[0], arguments)
            reads[cell].append(read(cell[0]))
            _prepare(cell[0], arguments)
            time.sleep(arguments.idle)
            starts[cell].append(start(cell, arguments))
    return [row(cell, starts[cell], reads[cell], touches[cell]) for cell in cells]


def _prepare(model: Path, arguments: argparse.Namespace) -> None:
    if arguments.cold:
        drop(model)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--models", nargs="+", default=["qwen2.5-0.5b"], help=f"folders, or of {', '.join(SHAPES)}, made on first use"
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="of the models that are made")
    parser.add_argument("--quantization", nargs="+", choices=("none", "int8", "int4"), default=["none", "int8"])
    parser.add_argument("--kv-memory", default="256MiB")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument(
        "--prefault", nargs="+", choices=("on", "off"), default=["on"], help="--prefault-weights or not"
    )
    parser.add_argument(
        "--map-embeddings", nargs="+", choices=("on", "off"), default=["on"], help="--map-embeddings or not"
    )
    parser.add_argument("--idle", type=float, default=0.0, help="seconds to wait before each start")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each start")


def main(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    arguments.models = [resolve(model, arguments.cache, "--models") for model in arguments.models]
    torch = {name: round(value / _MIB) for name, value in bare().items()}
    rows = measure(arguments)
    table = report.table(_COLUMNS)
    for one in rows:
        table.row(*shown(one))
    table.line(f"\nA process that has imported torch only: {torch['VmRSS']} MiB, {torch['RssAnon']} anonymous.")
    report.save({"settings": report.settings, "torch_alone_mib": torch, "rows": rows})
