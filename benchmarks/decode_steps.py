"""Time of single decode steps beside what their parts would take: how near a step is to the machine's limits.

    python -m benchmarks decode_steps [--model qwen2.5-0.5b] [--quantization none,int8,int4] [--batch 1,8,32]

A step is the model runner's: inputs, forward pass, logits and greedy tokens of `--batch` sequences with `--context`
tokens each. Before and after every step the machine is probed, in the same few hundred milliseconds, because its
bandwidth moves: a plain read (by as many threads) of a buffer as large as the weights and, from 16 rows on, the best
product of as many rows, of a weight that lies in the cache. A step's limit is the larger of the time to read
its weights, keys and values at that bandwidth, and that of its operations at that peak. Shares are of neighbours,
medians over `--pairs`; `memory_share` is that of reading alone.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks._arguments import at_least, be_quiet, numbers
from benchmarks._report import Report, Table
from benchmarks.checkpoints import BLOCK_SIZE, add_model_flags, resolve

# Rows from which a step is also held against the peak of multiplication.
MANY_ROWS = 16
# Columns that are shown of a row, beside its format and batch.
COLUMNS = ("step_ms", "memory_ms", "arithmetic_ms", "gb_s", "memory_share", "share", "share_quartiles")
# A weight that stays in the last cache, and how often it is multiplied in a probe.
OUT, IN, TURNS = 9728, 896, 3


@dataclass(frozen=True)
class Parts:
    """Bytes that a step reads, and its operations, two for each pair of factors."""

    weights: int
    keys_and_values: int
    operations: float


class Steps:
    """Decode steps of one batch. Contexts grow by a token a step, as in service."""

    def __init__(self, model: Any, kernels: Any, batch: int, context: int, steps: int) -> None:
        import torch
        from penstock.generation.attention.kv_cache import KVCachePool
        from penstock.generation.core.sampling_params import SamplingParams
        from penstock.generation.core.sequence import Sequence
        from penstock.generation.runner.model_runner import ModelRunner

        config = model.config
        each = -(-(context + steps + 1) // BLOCK_SIZE)
        self._pool = KVCachePool(
            config.num_layers,
            batch * each,
            BLOCK_SIZE,
            config.num_kv_heads,
            config.head_dim,
            model.dtype,
            model.device,
        )
        # Zeros that were never written are one page, in the cache.
        self._pool.tensors[0].normal_()
        self._runner = ModelRunner(model, self._pool, kernels=kernels)
        blocks = torch.randperm(batch * each).view(batch, each).tolist()
        ids = torch.randint(config.vocab_size, (batch, context + 1)).tolist()
        self._sequences = [
            Sequence(
                seq_id=number,
                index=0,
                params=SamplingParams(steps + 1),
                seed=number,
                token_ids=ids[number],
                num_prompt_tokens=context,
                block_table=blocks[number],
            )
            for number in range(batch)
        ]

    @property
    def tokens(self) -> int:
        """Keys and values that the next step reads."""
        return sum(len(one.token_ids) for one in self._sequences)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that these steps read."""
        return self.tokens * self._pool.bytes_per_block // BLOCK_SIZE

    def step(self) -> None:
        """One more token for every sequence."""
        from penstock.generation.core.step import ScheduledSequence, SchedulerOutput

        entries = tuple(ScheduledSequence(one, len(one.token_ids) - 1, 1, (one,)) for one in self._sequences)
        sampled = self._runner.execute(SchedulerOutput(entries)).sampled
        for one in self._sequences:
            one.token_ids.append(sampled[one.seq_id].token_id)


class Reader:
    """Reads a buffer of `num_bytes` once, from end to end, by `threads` threads."""

    def __init__(self, num_bytes: int, threads: int) -> None:
        import numpy

        buffer = numpy.ones(num_bytes // 8, dtype=numpy.int64)
        self._parts = numpy.array_split(buffer, threads)
        self._pool = ThreadPoolExecutor(threads)
        self._read = numpy.bitwise_or.reduce
        self._bytes = buffer.nbytes

    def bandwidth(self) -> float:
        """Bytes a second of one pass."""
        started = time.perf_counter()
        for _ in self._pool.map(self._read, self._parts):
            pass
        return self._bytes / (time.perf_counter() - started)


class Products:
    """The peak of multiplication at so many rows: of oneDNN's product and of ours, in the format of the weights."""

    def __init__(self, rows: int, quantization: str, dtype: Any) -> None:
        import torch
        from penstock.generation.host.cpu_features import packing_obstacle
        from penstock.generation.layers.linear.native import Format, NativeLinearMethod

        weight, x = torch.randn(OUT, IN).to(dtype), torch.randn(rows, IN).to(dtype)
        plain = Format.BF16 if dtype is torch.bfloat16 else Format.F32
        format = {"int8": Format.INT8, "int4": Format.INT4}.get(quantization, plain)
        self._calls: list[Callable[[], object]] = [partial(NativeLinearMethod(format).linear(weight, None), x)]
        if format is plain and packing_obstacle(dtype) is None:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
            product = torch.ops.mkldnn._linear_pointwise
            self._calls.append(partial(product, x, packed, None, "none", [], ""))
        self._operations = 2.0 * rows * OUT * IN

    def peak(self) -> float:
        """Operations a second."""
        return max(self._operations / self._seconds(call) for call in self._calls)

    def _seconds(self, call: Callable[[], object]) -> float:
        call()
        started = time.perf_counter()
        for _ in range(TURNS):
            call()
        return (time.perf_counter() - started) / TURNS


def parts_of(model: Any, steps: Steps, batch: int) -> Parts:
    """Return the parts of the next step."""
    config = model.config
    linears = [linear for layer in model.layers for linear in layer.quantisable]
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    layer = hidden * (2 * heads + 2 * config.num_kv_heads * config.head_dim) + 3 * hidden * config.intermediate_size
    weights = sum(linear.num_bytes for linear in linears) + model._lm_head.num_bytes
    attention = 4.0 * config.num_layers * heads * steps.tokens
    operations = 2.0 * batch * (config.num_layers * layer + config.vocab_size * hidden) + attention
    return Parts(weights, steps.kv_bytes, operations)


def measure_batch(
    model: Any, kernels: Any, quantization: str, batch: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Pairs of steps and probes."""
    steps = Steps(model, kernels, batch, options.context, options.pairs + 4)
    parts = parts_of(model, steps, batch)
    reader = Reader(parts.weights, options.threads)
    # Objects that are loaded are not looked at again by the garbage collector, as in the service.
    gc.freeze()
    products = Products(batch, quantization, model.dtype) if batch >= MANY_ROWS else None

    def probe() -> tuple[float, float]:
        return reader.bandwidth(), products.peak() if products is not None else float("inf")

    for _ in range(3):
        steps.step()
        probe()
    rows: list[dict[str, float]] = []
    before = probe()
    for _ in range(options.pairs):
        parts = parts_of(model, steps, batch)
        started = time.perf_counter()
        steps.step()
        seconds = time.perf_counter() - started
        after = probe()
        bandwidth, peak = ((one + other) / 2 for one, other in zip(before, after, strict=True))
        before = after
        memory, arithmetic = (parts.weights + parts.keys_and_values) / bandwidth, parts.operations / peak
        limit = max(memory, arithmetic)
        rows.append(
            {
                "step_ms": seconds * 1e3,
                "memory_ms": memory * 1e3,
                "arithmetic_ms": arithmetic * 1e3,
                "gb_s": bandwidth / 1e9,
                "g_op_s": peak / 1e9 if products is not None else 0.0,
                "memory_share": memory / seconds,
                "share": limit / seconds,
            }
        )
    medians = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
    quartiles = statistics.quantiles([row["share"] for row in rows], n=4)
    return {
        "batch": batch,
        "weight_bytes": parts.weights,
        "kv_bytes": parts.keys_and_values,
        **medians,
        "share_quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every quantization and batch; rows are shown as they come."""
    from penstock.generation.devices.cpu import CPUDevice
    from penstock.generation.models.registry import load_model

    device = CPUDevice()
    device.start(num_threads=options.threads, kernels="native")
    folder = resolve(options.model, options.cache)
    cells = []
    table = Table(["quantization", "batch", *COLUMNS], options.json)
    for quantization in options.quantization:
        model = load_model(folder, dtype=options.dtype, quantization=quantization, device=device)
        for batch in options.batch:
            found = measure_batch(model, device.sampling_kernels(), quantization, batch, options)
            cells.append({"quantization": quantization, **found})
            table.row(quantization, batch, *(found[name] for name in COLUMNS))
        del model
    return {
        "model": options.model,
        "dtype": options.dtype,
        "context": options.context,
        "device": device.describe(),
        "load_average": os.getloadavg()[0],
        "cells": cells,
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_flags(parser)
    parser.add_argument("--batch", type=numbers, default="1,8,32", help="sequences a step, a list with commas")
    parser.add_argument("--context", type=at_least(1), default=192)
    parser.add_argument("--pairs", type=at_least(2), default=40, help="of a step and a probe; 2 or more")


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)
    report.save(measure(options))
