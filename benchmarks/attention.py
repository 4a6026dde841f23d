"""Time of one layer's attention: the C++ kernels beside torch's operators, for every format of the KV pool, in turns.

    python -m benchmarks attention [--threads 1] [--dtype bfloat16] [--heads 14 2 64] [--repeats 15] [--json FILE]

Decode: one row for each of `batch` sequences of `context` tokens, the row's keys and values written first. Prefill: one
prompt of `context` tokens from nothing. Calls go round `--layers` layers, as a model's do, so that a long context is
not in the cache from the call before. Medians (and the fastest) of one call in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from penstock.generation.attention.base import Attention, AttentionLayer, AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.native import NativeAttention
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.devices.cpu import CPUDevice

from benchmarks._arguments import be_quiet
from benchmarks._report import Report

BLOCK_SIZE = 16
# (batch, context of each): decode; (1, prompt): prefill.
DECODE = ((1, 192), (8, 192), (32, 160), (1, 4096), (8, 4096))
PREFILL = (128, 512, 2048)


class Case:
    """Rows of one step over pools of one format."""

    def __init__(self, options: argparse.Namespace, batch: int, context: int, rows: int, kv_dtype: torch.dtype) -> None:
        dtype = getattr(torch, options.dtype)
        blocks = -(-context // BLOCK_SIZE)
        num_heads, kv_heads, head_dim = options.heads
        sizes = (num_heads, kv_heads, head_dim, head_dim**-0.5)
        self._layers = [AttentionLayer(*sizes, index) for index in range(options.layers)]
        device = torch.device("cpu")
        self._kv = KVCachePool(options.layers, batch * blocks, BLOCK_SIZE, kv_heads, head_dim, kv_dtype, device)
        for layer in range(options.layers):
            shape = (self._kv.num_slots, kv_heads, head_dim)
            everything = torch.arange(self._kv.num_slots)
            self._kv.write(layer, everything, torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
        tables = torch.randperm(batch * blocks).view(batch, blocks).int()
        self._metadata, positions = AttentionMetadata.build([rows] * batch, [context] * batch, tables, BLOCK_SIZE)
        self._qkv = torch.randn(batch * rows, (num_heads + 2 * kv_heads) * head_dim).to(dtype)
        angles = positions[:, None, None] / 1e6 ** torch.linspace(0, 1, head_dim // 2)
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def call(self, attention: Attention) -> Callable[[], None]:
        """One layer, the next one each time."""
        layers = cycle(self._layers)

        def run() -> None:
            attention.forward_qkv(self._qkv, self._cos, self._sin, next(layers), self._metadata, self._kv)

        return run


def interleaved(
    calls: dict[str, Callable[[], None]], repeats: int, now: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """Microseconds of a call, in turns; every turn is at least a millisecond of calls."""
    counts = {}
    for name, call in calls.items():
        call()
        start = now()
        call()
        counts[name] = max(1, round(2e-3 / (now() - start)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = now()
            for _ in range(counts[name]):
                call()
            times[name].append((now() - start) / counts[name] * 1e6)
    return {
        name: {"median_us": round(statistics.median(values), 1), "fastest_us": round(min(values), 1)}
        for name, values in times.items()
    }


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one JSON object."""
    device = CPUDevice()
    device.start(num_threads=options.threads)
    dtype = getattr(torch, options.dtype)
    implementations: dict[str, Attention] = {"native": NativeAttention()} if device.instruction_set else {}
    if not options.native_only:
        implementations["torch"] = SDPAAttention()
    cases = [("decode", batch, context, 1) for batch, context in DECODE]
    cases += [("prefill", 1, prompt, prompt) for prompt in PREFILL]
    now = time.thread_time if options.cpu_time else time.perf_counter
    results = []
    for kind, batch, context, rows in cases:
        calls = {}
        for kv_dtype in (dtype, torch.int8):
            case = Case(options, batch, context, rows, kv_dtype)
            for name, attention in implementations.items():
                label = "int8" if kv_dtype is torch.int8 else options.dtype
                calls[f"{name} {label}"] = case.call(attention)
        results.append({"case": kind, "batch": batch, "context": context, **interleaved(calls, options.repeats, now)})
    return {"device": device.describe(), "heads": options.heads, "layers": options.layers, "results": results}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--heads", type=int, nargs=3, default=[14, 2, 64], metavar=("QUERY", "KV", "DIM"))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--native-only", action="store_true", help="without torch's operators")
    parser.add_argument("--cpu-time", action="store_true", help="not by the clock: for one thread on a busy machine")


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)
    report.write(measure(options))
