"""Preemption by swap, by recompute and by what the engine finds cheaper, in a KV pool that is too small.

    python -m benchmarks swap [--model DIR] [--threads 2] [--overcommit 4] [--rounds 3] [--loads long,short]

`long`: few requests with long prompts, which take long to compute again. `short`: many with short prompts and a common
beginning, which stays in the pool for whoever comes back. All requests are there at once, greedy, and answers grow
while they run, so requests have to give way. Every cell is a new engine on the same model, and the ways are taken in
turns, another one first in each round. `roomy` is the same load in a pool that holds all of it. Ids must be the same in
all cells; they are compared.

`lost_seconds` are those that preemptions took: copies as they were measured, and tokens that were computed again at
what a row of this cell's steps takes (least squares over its steps). On a machine with other work on it compare the
CPU's seconds, of all threads.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks._arguments import be_quiet, names
from benchmarks._report import Report
from benchmarks.checkpoints import BLOCK_SIZE, resolve

if TYPE_CHECKING:
    from penstock.generation.core.step import RunnerOutput, SchedulerOutput
    from penstock.generation.devices.base import Device
    from penstock.generation.models.decoder import CausalLM
    from penstock.generation.runner.model_runner import ModelRunner

LARGEST_ID = 4000
ROOMY = "roomy"
WAYS = (ROOMY, "recompute", "swap", "auto")


@dataclass(frozen=True)
class Load:
    """Requests that are there at once; tokens."""

    count: int
    common: int
    own: int
    output: int

    def scaled(self, share: float) -> Load:
        """Return the load with shorter prompts and answers."""
        sizes = (self.common, self.own, self.output)
        return Load(self.count, *(max(min(size, 1), int(share * size)) for size in sizes))

    def requests(self) -> list[list[int]]:
        """Prompts, the same each time."""
        rng = random.Random(f"{self}")
        common = [rng.randrange(LARGEST_ID) for _ in range(self.common)]
        return [common + [rng.randrange(LARGEST_ID) for _ in range(self.own)] for _ in range(self.count)]

    @property
    def blocks(self) -> int:
        """Blocks of one request at its end."""
        return -(-(self.common + self.own + self.output - 1) // BLOCK_SIZE)


LOADS = {"long": Load(12, 0, 384, 128), "short": Load(48, 16, 16, 64)}


@dataclass
class Timed:
    """Runner that notes the rows and the seconds of each step, without its copies."""

    runner: ModelRunner
    steps: list[tuple[int, float]] = field(default_factory=list)

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        started = time.perf_counter()
        result = self.runner.execute(output)
        seconds = time.perf_counter() - started - result.out_seconds - result.in_seconds
        self.steps.append((output.num_tokens, seconds))
        return result

    def release(self, seq_ids: Any) -> None:
        self.runner.release(seq_ids)

    @property
    def row_seconds(self) -> float:
        """Seconds that one more row takes."""
        rows = [float(count) for count, _ in self.steps]
        if len(set(rows)) < 2:
            return 0.0
        return max(statistics.linear_regression(rows, [seconds for _, seconds in self.steps]).slope, 0.0)


def measure(model: CausalLM, device: Device, load: Load, way: str, overcommit: float) -> tuple[dict[str, Any], Any]:
    """One load from an idle engine to its end; its figures, and the ids."""
    from penstock.generation.attention.host_kv import HostKVPool
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.core.request import Request
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.engine import Engine
    from penstock.generation.runner.model_runner import ModelRunner

    facts, all_blocks = model.config, load.count * load.blocks
    blocks = all_blocks + 1 if way == ROOMY else max(int(all_blocks / overcommit), load.blocks)
    geometry = (BLOCK_SIZE, facts.num_kv_heads, facts.head_dim)
    kv = KVCachePool(facts.num_layers, blocks, *geometry, model.dtype, model.device)
    host = None if way in (ROOMY, "recompute") else HostKVPool(kv, all_blocks)
    runner = Timed(ModelRunner(model, kv, kernels=device.sampling_kernels(), host=host))
    runner.runner.warm_up()
    config = EngineConfig(
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        max_context_tokens=facts.max_position_embeddings,
        num_host_blocks=0 if host is None else host.num_blocks,
        block_bytes=kv.bytes_per_block,
        preemption="auto" if host is None else way,
        # The way alone is compared: no prefix leaves the pool.
        host_prefix_cache=False,
    )
    engine = Engine(config, runner, None)
    for number, prompt in enumerate(load.requests()):
        params = SamplingParams(load.output, ignore_eos=True)
        engine.add(Request(f"request-{number}", prompt, params, float(number)))
    ids: dict[str, list[int]] = {}
    started, cpu = time.perf_counter(), time.process_time()
    while engine.has_work:
        for output in engine.step():
            for delta in output.deltas:
                ids.setdefault(output.request.request_id, []).extend(delta.token_ids)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    stats, row = engine.stats, runner.row_seconds
    copying = stats.host_out_seconds + stats.host_in_seconds
    again = stats.computed_tokens - load.count * (load.common + load.own + load.output - 1) + stats.prefix_hit_tokens
    figures = {
        "way": way,
        "tokens": [load.common + load.own, load.output],
        "blocks": blocks,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "output_tokens_per_second": round(load.count * load.output / seconds, 1),
        "output_tokens_per_cpu_second": round(load.count * load.output / cpu, 1),
        "preemptions": stats.preemptions,
        "swaps": stats.swaps,
        "copied_mib": round((stats.host_out_blocks + stats.host_in_blocks) * kv.bytes_per_block / 2**20, 1),
        "copy_seconds": round(copying, 3),
        "tokens_again": max(again, 0),
        "row_ms": round(row * 1e3, 3),
        "lost_seconds": round(copying + max(again, 0) * row, 3),
    }
    return figures, ids


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--model", default="qwen2.5-0.5b", help="folder, or a shape of checkpoints.py")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--dtype", default="auto", help="torch's kernels give the same ids in float32 only")
    parser.add_argument("--overcommit", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", type=names(LOADS, "load"), default=list(LOADS))
    parser.add_argument("--share", type=float, default=1.0, help="of the lengths, for a machine with little time")


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)

    from penstock.generation.devices.cpu import CPUDevice
    from penstock.generation.models.registry import load_model

    device = CPUDevice()
    device.start(num_threads=options.threads, kernels=options.kernels)
    model = load_model(resolve(options.model), device=device, dtype=options.dtype)
    cells = []
    for name in options.loads:
        wanted: Any = None
        for number in range(options.rounds):
            for place in range(len(WAYS)):
                way = WAYS[(place + number) % len(WAYS)]
                figures, ids = measure(model, device, LOADS[name].scaled(options.share), way, options.overcommit)
                wanted = ids if wanted is None else wanted
                cells.append({"load": name, "round": number, **figures, "same_ids": ids == wanted})
                print(cells[-1], file=sys.stderr)
    facts = {"device": device.describe(), "dtype": str(model.dtype), "model": model.config.num_parameters}
    report.write({**facts, "overcommit": options.overcommit, "cells": cells})
