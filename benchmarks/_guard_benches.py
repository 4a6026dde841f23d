"""The benchmarks of `guard`: how a tree's own script is asked, and what is read from its JSON.

A script is spoken to by its flags, its lines and its JSON alone, as these were when `guard` came: trees may differ in
everything else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Times of every turn by cell: seconds, milliseconds, or seconds a token; only their ratios are used.
Times = dict[str, list[float]]
# A sign that a script never prints: its turn is its whole run.
WHOLE_RUN = re.compile(r"(?!)")


@dataclass(frozen=True)
class Setting:
    """Flags that all scripts get."""

    model: Path
    threads: int


@dataclass(frozen=True)
class Effort:
    """Number of turns of a benchmark: `cycles` through its cells in one run, and so many runs of each tree."""

    cycles: int
    rounds: int
    # With those for cells that are noisy.
    most_rounds: int


@dataclass(frozen=True)
class Bench:
    """A script and its flags. `flags` makes them for a setting, the cycles of the effort and the file for the JSON."""

    name: str
    script: str
    effort: Effort
    flags: Callable[[Setting, int, Path], list[str]]
    # A line of its output that says that a turn has ended.
    turn_ends: re.Pattern[str]
    times: Callable[[Mapping[str, Any]], Times]
    # Turns before the same one comes again, and those of a run.
    period: int
    turns: int
    needs_kernels: bool = False
    # Seconds that no cell of this tree may take, whatever the base does.
    most_seconds: float = math.inf
    # True: both trees' services are measured by this tree's script, which is told the tree by --tree. The base may be
    # older than the script.
    is_ours: bool = False

    def starts_with_base(self, number: int, turn: int) -> bool:
        """True when the base goes first in this turn of this round: in each cell the trees take it in turns (ABBA)."""
        return (number + turn // self.period + turn % self.period) % 2 == 0


def decode_steps(batches: Sequence[int], pairs: int, effort: Effort) -> Bench:
    """Single steps of the model runner at each batch; a turn is `pairs` steps of one."""

    def flags(setting: Setting, cycles: int, out: Path) -> list[str]:
        every = ",".join(map(str, [*batches] * cycles))
        given = ["--model", str(setting.model), "--threads", str(setting.threads), "--json", str(out)]
        return [*given, "--quantization", "none", "--batch", every, "--pairs", str(pairs)]

    return Bench(
        "decode_steps",
        "decode_steps",
        effort,
        flags,
        re.compile(r"^\| none \| \d+ \|"),
        decode_step_times,
        period=len(batches),
        turns=len(batches) * effort.cycles,
        needs_kernels=True,
    )


def decode_step_times(result: Mapping[str, Any]) -> Times:
    """Milliseconds a step."""
    times: Times = {}
    for cell in result["cells"]:
        times.setdefault(f"decode step of {cell['batch']}", []).append(cell["step_ms"])
    return times


def workloads(names: Sequence[str], effort: Effort) -> Bench:
    """Penstock's engine without gRPC; a turn is one workload."""

    def flags(setting: Setting, cycles: int, out: Path) -> list[str]:
        given = ["--model", str(setting.model), "--threads", str(setting.threads), "--json", str(out)]
        chosen = ["--engines", "penstock", "--workloads", ",".join(names), "--rounds", str(cycles)]
        return [*given, *chosen, "--warmup", "0", "--probe-seconds", "0"]

    return Bench(
        " ".join(names),
        "workloads",
        effort,
        flags,
        re.compile(r"\bround \d+ \w+ penstock: "),
        workload_times,
        period=len(names),
        turns=len(names) * effort.cycles,
    )


# Figure that a workload is judged by, and True when it is a speed.
_FIGURES = {
    "W1": (("W1 first token", "ttft_s", False), ("W1 further tokens", "decode_tok_s", True)),
    "W2": (("W2", "output_tok_s", True),),
    "W5": (("W5", "output_tok_s", True),),
}


def workload_times(result: Mapping[str, Any]) -> Times:
    """Seconds, or seconds a token. Raises ValueError with the engine's own reason when it failed."""
    if result["failures"]:
        raise ValueError("; ".join(f"{engine}: {reason}" for engine, reason in result["failures"].items()))
    times: Times = {}
    for row in result["rows"]:
        for cell, figure, is_speed in _FIGURES[row["workload"]]:
            found = [one[figure] for one in row["rounds"]]
            times[cell] = [1 / one for one in found] if is_speed else found
    return times


def engine_overhead(sequences: Sequence[int], contexts: Sequence[int], effort: Effort) -> Bench:
    """Schedule and update without a model; a turn is the whole script, whatever the cycles."""

    def flags(setting: Setting, cycles: int, out: Path) -> list[str]:
        every = [",".join(map(str, values)) for values in (sequences, contexts)]
        return ["--sequences", every[0], "--contexts", every[1], "--out", str(out)]

    return Bench(
        "engine_overhead",
        "engine_overhead",
        effort,
        flags,
        WHOLE_RUN,
        engine_overhead_times,
        period=1,
        turns=1,
    )


def engine_overhead_times(result: Mapping[str, Any]) -> Times:
    """Milliseconds a step."""
    times: Times = {}
    for cell in result["cells"]:
        stop = ", stop strings" if cell["stop_strings"] else ""
        name = f"engine step of {cell['sequences']} × {cell['context']}{stop}"
        times.setdefault(name, []).append(cell["step_ms_p50"])
    return times


def wire(streams: Sequence[int], round_tokens: int, effort: Effort) -> Bench:
    """Router and tokenizer before a backend that emits at will, both kinds of load; a turn is a round of one cell."""

    def flags(setting: Setting, cycles: int, out: Path) -> list[str]:
        every = [str(count) for count in [*streams] * cycles]
        return ["--streams", *every, "--rounds", "1", "--round-tokens", str(round_tokens), "--out", str(out)]

    return Bench(
        f"wire {' '.join(map(str, streams))}",
        "wire",
        effort,
        flags,
        re.compile(r"^\|\s*now\s*\|"),
        wire_times,
        period=len(streams),
        turns=2 * len(streams) * effort.cycles,
    )


def wire_times(result: Mapping[str, Any]) -> Times:
    """Seconds a token, and the router's and tokenizer's processor time for it. Raises ValueError for failed streams."""
    times: Times = {}
    for row in result["rows"]:
        name = f"wire {row['mode']} {row['streams']}"
        if row["failed"]:
            raise ValueError(f"{name}: {row['failed']} streams failed")
        spent = row["cpu_us_per_token"]
        times.setdefault(name, []).append(1 / row["tokens_per_second"])
        times.setdefault(f"{name}, CPU", []).append(spent["router"] + spent["tokenizer"])
    return times


def gateway(tokens: int, requests: int, effort: Effort) -> Bench:
    """Requests one after the other at a gateway before a router; a turn is a round of one kind of request."""

    def flags(setting: Setting, cycles: int, out: Path) -> list[str]:
        every = ["--tokens", str(tokens), "--round-tokens", str(tokens * requests)]
        return [*every, "--cycles", str(cycles), "--out", str(out)]

    return Bench(
        f"gateway {tokens}",
        "gateway_requests",
        effort,
        flags,
        re.compile(r"^\| (?:chat|completion) "),
        gateway_request_times,
        period=4,
        turns=4 * effort.cycles,
        is_ours=True,
    )


def gateway_request_times(result: Mapping[str, Any]) -> Times:
    """Processor time of gateway and router for a request, and their calls."""
    times: Times = {}
    for row in result["rows"]:
        for part, spent in row["cpu_us"].items():
            times.setdefault(f"{part}, {row['cell']}, CPU", []).append(spent)
            times.setdefault(f"{part}, {row['cell']}, calls", []).append(row["calls"][part])
    return times


# The bound on the work of a tokenizer's start, behind transformers' own reading.
TOKENIZER_SECONDS = 2.0


def starts(effort: Effort) -> Bench:
    """Starts of tokenizers, one with as many added tokens as Gemma 3 has; a turn is the whole script."""

    def flags(setting: Setting, cycles: int, out: Path) -> list[str]:
        return ["--only", "tokenizers", "--out", str(out)]

    return Bench(
        "starts",
        "starts",
        effort,
        flags,
        WHOLE_RUN,
        start_times,
        period=1,
        turns=1,
        most_seconds=TOKENIZER_SECONDS,
    )


def start_times(result: Mapping[str, Any]) -> Times:
    """Seconds of the processor."""
    return {f"start of a tokenizer, {cell['name']}": [cell["rest"]] for cell in result["cells"]}


MODES = ("quick", "full")
# More rounds of noisy cells are begun in quick mode only where they will end by then.
QUICK_SECONDS = 340.0
# Benchmarks by their first word, for --only.
NAMES = ("decode_steps", "W1", "W5", "engine_overhead", "wire", "gateway", "starts")


def benches(mode: str) -> list[Bench]:
    """Return the benchmarks of a mode, short ones first. Times are for two cores of 2025: quick must end within six
    minutes."""
    few, tokens = [8], 20_480
    many = [64, 256]
    if mode == "quick":
        return [
            starts(Effort(1, 2, 4)),
            engine_overhead([1, 32], [128, 4096], Effort(1, 8, 12)),
            decode_steps([1, 8, 32], 6, Effort(2, 2, 3)),
            wire(few, tokens, Effort(2, 1, 2)),
            wire(many, 80_000, Effort(3, 1, 2)),
            gateway(16, 100, Effort(3, 1, 3)),
            workloads(["W1", "W2"], Effort(2, 1, 2)),
            workloads(["W5"], Effort(1, 1, 2)),
        ]
    return [
        starts(Effort(1, 5, 10)),
        engine_overhead([1, 32], [128, 4096], Effort(1, 20, 40)),
        decode_steps([1, 8, 32], 10, Effort(3, 5, 10)),
        wire(few, tokens, Effort(2, 5, 10)),
        wire(many, 80_000, Effort(3, 5, 10)),
        gateway(16, 200, Effort(3, 5, 10)),
        gateway(128, 40, Effort(3, 5, 10)),
        workloads(["W1", "W2"], Effort(2, 5, 10)),
        workloads(["W5"], Effort(1, 5, 10)),
    ]
