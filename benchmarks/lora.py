"""Throughput with LoRA adapters over that without, in turns on one engine: decode steps and whole workloads.

    python -m benchmarks lora [--model qwen2.5-0.5b] [--adapters 8] [--ranks 8,16] [--rounds 5] [--json FILE]

The adapters are random and change all seven linear layers of every decoder layer; their ranks are those of `--ranks` in
turn. Requests get them in turn. A cell's ratio is the median over rounds of neighbours: the same requests without and
with adapters, one after the other, so that a machine's drift in speed is the same for both. `decode-N` is the rate of
tokens of N sequences that decode, one engine step each; W2 and W5 are those of benchmarks/workloads.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks._arguments import at_least, be_quiet, names, numbers
from benchmarks._report import Report, Table
from benchmarks.cells import WORKLOADS, Workload, tokens_needed
from benchmarks.checkpoints import add_model_flags, resolve

# Prompt tokens of a decode cell, and its steps.
CONTEXT, STEPS = 128, 24
COLUMNS = ("cell", "quantization", "none_tok_s", "adapters_tok_s", "ratio", "quartiles")


class Bench:
    """An engine of one model, and its adapters."""

    def __init__(self, quantization: str, options: argparse.Namespace) -> None:
        from penstock.common.progress import show_nothing
        from penstock.generation.attention.kv_cache import kv_bytes_per_block
        from penstock.generation.config import GenerationServiceConfig
        from penstock.generation.core.adapter import Adapter
        from penstock.generation.engine.engine import Engine
        from penstock.generation.models.registry import read_model_config
        from penstock.generation.startup.load import load

        folder = resolve(options.model, options.cache)
        facts = read_model_config(folder)
        tokens = tokens_needed([WORKLOADS[name] for name in options.workloads] or [WORKLOADS["W2"]])
        tokens = max(tokens, max(options.decode, default=0) * (CONTEXT + STEPS + 16)) + 1024
        import torch

        dtype = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype]
        each = kv_bytes_per_block(facts.num_layers, 1, facts.num_kv_heads, facts.head_dim, dtype)
        config = GenerationServiceConfig(
            model=str(folder),
            quantization=quantization,
            dtype=options.dtype,
            threads=options.threads,
            kv_memory=str(tokens * each),
            max_context=4096,
            kernels=options.kernels,
        )
        self.loaded = load(config, "bench", show_nothing)
        self.adapters = [
            Adapter(
                str(number),
                Path(),
                str(number),
                rank,
                (),
                (weights := random_adapter(self.loaded.weights.model, rank, number)).num_bytes,
                weights,
            )
            for number, rank in zip(range(options.adapters), itertools.cycle(options.ranks), strict=False)
        ]
        self.engine = Engine(self.loaded.engine.config, self.loaded.engine.runner, None)
        # As a service's engine does.
        self.engine.device_blocks.on_grow = self.loaded.pools.kv.leave_small_pages
        self._ids = itertools.count()

    def decode(self, batch: int, seed: int, *, adapted: bool) -> float:
        """Tokens a second of `batch` sequences in steps that only decode."""
        workload = Workload("decode", "", ((CONTEXT, STEPS + 2),) * batch)
        self._add(workload, seed, adapted=adapted)
        while self.engine.load().pending_prompt_tokens or self.engine.num_waiting:
            self.engine.step()
        self.engine.step()
        started, done = time.perf_counter(), self.engine.stats.generated_tokens
        for _ in range(STEPS // 2):
            self.engine.step()
        seconds, tokens = time.perf_counter() - started, self.engine.stats.generated_tokens - done
        while self.engine.has_work:
            self.engine.step()
        return tokens / seconds

    def workload(self, workload: Workload, seed: int, *, adapted: bool) -> float:
        """Output tokens a second of all requests of a workload."""
        self._add(workload, seed, adapted=adapted)
        started, done = time.perf_counter(), self.engine.stats.generated_tokens
        while self.engine.has_work:
            self.engine.step()
        return (self.engine.stats.generated_tokens - done) / (time.perf_counter() - started)

    def _add(self, workload: Workload, seed: int, *, adapted: bool) -> None:
        from penstock.generation.core.request import Request
        from penstock.generation.core.sampling_params import SamplingParams

        prompts, outputs = workload.requests(self.loaded.served.vocab_size, seed)
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            self.engine.add(
                Request(
                    str(next(self._ids)),
                    prompt,
                    SamplingParams(output, ignore_eos=True),
                    time.monotonic(),
                    adapter=self.adapters[number % len(self.adapters)] if adapted else None,
                )
            )


def random_adapter(model: Any, rank: int, seed: int) -> Any:
    """Make an adapter of all linear layers of the decoder layers."""
    import torch
    from penstock.generation.layers.lora import SITES_A_LAYER, LoraPart
    from penstock.generation.weights.tensor_names import layer_linears

    draw = torch.Generator().manual_seed(seed)
    sites: dict[int, list[LoraPart]] = {}
    for layer in range(model.config.num_layers):
        for number, linear in enumerate(layer_linears(model.config, layer)):
            first = 0
            for rows in linear.rows:
                a = (torch.randn(rank, linear.inputs, generator=draw) / linear.inputs**0.5).to(model.dtype)
                b = (torch.randn(rows, rank, generator=draw) * 0.01).to(model.dtype)
                sites.setdefault(layer * SITES_A_LAYER + number, []).append(LoraPart(first, a, b, 1.0))
                first += rows
    return model.adapter_weights(sites, None)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every cell; rows are shown as they come."""
    cells = []
    table = Table(COLUMNS, options.json)
    for quantization in options.quantization:
        bench = Bench(quantization, options)
        runs = {f"decode-{batch}": (bench.decode, batch) for batch in options.decode}
        runs |= {name: (bench.workload, WORKLOADS[name]) for name in options.workloads}
        for name, (run, what) in runs.items():
            pairs = []
            for number in range(-1, options.rounds):
                # Which comes first changes from round to round.
                order = (False, True) if number % 2 else (True, False)
                found = {adapted: run(what, 2 * number + adapted, adapted=adapted) for adapted in order}
                if number >= 0:
                    pairs.append(found)
            ratios = [pair[True] / pair[False] for pair in pairs]
            quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
            cell = {
                "cell": name,
                "quantization": quantization,
                "none_tok_s": round(statistics.median(pair[False] for pair in pairs), 1),
                "adapters_tok_s": round(statistics.median(pair[True] for pair in pairs), 1),
                "ratio": round(statistics.median(ratios), 3),
                "quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
            }
            cells.append(cell)
            table.row(*(cell[column] for column in COLUMNS))
        del bench
    return {
        "model": options.model,
        "dtype": options.dtype,
        "adapters": options.adapters,
        "ranks": options.ranks,
        "rounds": options.rounds,
        "load_average": os.getloadavg()[0],
        "cells": cells,
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_flags(parser)
    parser.add_argument("--adapters", type=at_least(1), default=8)
    parser.add_argument("--ranks", type=numbers, default="8,16", help="a list with commas")
    parser.add_argument("--decode", type=numbers, default="8,32", help="sequences a step, a list with commas")
    parser.add_argument("--workloads", type=names(WORKLOADS, "workload"), default="W2,W5")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--kernels", choices=("native", "torch"), default="native")


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)
    report.save(measure(options))
