"""The scheduler on whole workloads and a real model, through the engine: rows, steps, time, gaps.

    python -m benchmarks scheduler [--model DIR] [--threads 2] [--budgets 128,512] [--workloads W3,W5,W6] [--json FILE]

W3: 32 x (128 -> 64). W4: 1 x (2048 -> 16). W5: 64 mixed requests, prompts of 32 to 512 and outputs of 16 to 128 tokens.
W6: 32 x (512 common + 32 own -> 32). All requests are there at once. Without --model the random Qwen2.5-0.5B of
checkpoints.py. Every cell is a new engine on the same model; budgets are taken in turns. W6 runs without the prefix
cache beside it. `gap`: seconds between two steps that drew for a sequence that was decoding already. `waited` counts
decoding sequences that a step left out: it must be 0.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.request import Request
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.step import RunnerOutput, SchedulerOutput
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.engine import Engine
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.runner.model_runner import ModelRunner

from benchmarks._arguments import be_quiet
from benchmarks._report import Report, percentile
from benchmarks.checkpoints import BLOCK_SIZE, CACHE, checkpoint

LARGEST_ID = 10_000


def workload(name: str) -> list[tuple[list[int], int]]:
    """(prompt, output tokens) of every request, the same each time."""
    rng = random.Random(name)

    def ids(count: int) -> list[int]:
        return [rng.randrange(LARGEST_ID) for _ in range(count)]

    if name == "W3":
        return [(ids(128), 64) for _ in range(32)]
    if name == "W4":
        return [(ids(2048), 16)]
    if name == "W5":
        return [(ids(rng.randint(32, 512)), rng.randint(16, 128)) for _ in range(64)]
    if name == "W6":
        common = ids(512)
        return [(common + ids(32), 32) for _ in range(32)]
    raise SystemExit(f"--workloads: no workload {name}")


@dataclass
class Watch:
    """A runner that times its steps and looks for decoding sequences that were left out."""

    runner: ModelRunner
    # Of each step: its end, its rows, and True when it drew for a sequence that had drawn before.
    steps: list[tuple[float, int, bool]] = field(default_factory=list)
    waited: int = 0
    decoding: set[int] = field(default_factory=set)

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.decoding.difference_update(output.released)
        drawing = {one.seq_id for entry in output.scheduled for one in entry.sample}
        self.waited += len(self.decoding - drawing)
        goes_on = not self.decoding.isdisjoint(drawing)
        result = self.runner.execute(output)
        self.steps.append((time.perf_counter(), output.num_tokens, goes_on))
        self.decoding |= drawing
        return result

    def release(self, seq_ids: Any) -> None:
        self.runner.release(seq_ids)


def measure(model: CausalLM, name: str, budget: int, *, prefix_cache: bool = True) -> dict[str, Any]:
    """One workload from an idle engine to its end."""
    requests = workload(name)
    blocks = sum(-(-(len(prompt) + length) // BLOCK_SIZE) + 1 for prompt, length in requests)
    facts = model.config
    kv = KVCachePool(
        facts.num_layers, blocks, BLOCK_SIZE, facts.num_kv_heads, facts.head_dim, model.dtype, model.device
    )
    watch = Watch(ModelRunner(model, kv))
    watch.runner.warm_up()
    config = EngineConfig(
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        max_context_tokens=4096,
        max_batch_tokens=budget,
        prefix_cache=prefix_cache,
    )
    engine = Engine(config, watch, None)
    started, cpu = time.perf_counter(), time.process_time()
    for number, (prompt, length) in enumerate(requests):
        params = SamplingParams(length, ignore_eos=True)
        engine.add(Request(f"request-{number}", prompt, params, time.monotonic()))
    first: dict[str, float] = {}
    while engine.has_work:
        for output in engine.step():
            if output.deltas:
                first.setdefault(output.request.request_id, time.perf_counter() - started)
    seconds = time.perf_counter() - started
    cpu = time.process_time() - cpu
    ends = [started, *(end for end, _, _ in watch.steps)]
    gaps = [end - before for before, (end, _, goes_on) in zip(ends, watch.steps, strict=False) if goes_on]
    return {
        "workload": name,
        "budget": budget,
        "prefix_cache": prefix_cache,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "output_tokens_per_second": round(sum(length for _, length in requests) / seconds, 1),
        "rows": sum(rows for _, rows, _ in watch.steps),
        "prompt_tokens": sum(len(prompt) for prompt, _ in requests),
        "steps": len(watch.steps),
        "waited": watch.waited,
        "first_token_p50": round(statistics.median(first.values()), 2),
        "first_token_p99": round(percentile(list(first.values()), 0.99), 2),
        "gap_p50": round(statistics.median(gaps), 3),
        "gap_p99": round(percentile(gaps, 0.99), 3),
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--model", type=Path)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--budgets", default="128,512")
    parser.add_argument("--workloads", default="W3,W4,W5,W6")
    parser.add_argument("--rounds", type=int, default=1)


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)
    device = CPUDevice()
    device.start(num_threads=options.threads)
    model = load_model(options.model or checkpoint("qwen2.5-0.5b", options.cache), device=device, dtype=options.dtype)
    cells = []
    for name in options.workloads.split(","):
        for _ in range(options.rounds):
            for budget in map(int, options.budgets.split(",")):
                cells.append(measure(model, name, budget))
            if name == "W6":
                cells.append(measure(model, name, budget, prefix_cache=False))
    report.write({"device": device.describe(), "dtype": str(model.dtype), "cells": cells})
