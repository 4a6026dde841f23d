"""Time of one forward pass of a Qwen2.5-0.5B-shaped random model: ours beside transformers', interleaved in one run.

    python -m benchmarks forward [--cache DIR] [--threads 2] [--dtype bfloat16] [--json FILE]

Decode: one step (forward, logits of every row, argmax) at a context of `--context` tokens; transformers runs the same
step on a DynamicCache, as its generate() does. Prefill: one prompt of `--prompt` tokens. The checkpoint is made on
first use, outside git. Steps are taken in turns, because the machine's speed drifts; the median and the fastest of
`--repeats` are given. OpenMP waits as it does in the service.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from benchmarks import checkpoints
from benchmarks._arguments import be_quiet
from benchmarks._report import Report

BLOCK_SIZE = 16
SHAPE: dict[str, Any] = dict(checkpoints.QWEN.fields)


def checkpoint(cache: Path, seed: int) -> Path:
    """The random model's folder, made when it is not there."""
    return checkpoints.checkpoint("qwen2.5-0.5b", cache, seed)


class Ours:
    """A batch of `batch` sequences with `context` computed tokens each."""

    def __init__(self, model: CausalLM, batch: int, context: int) -> None:
        self.model = model
        config = model.config
        per_sequence = -(-(context + 1) // BLOCK_SIZE)
        self.kv = KVCachePool(
            config.num_layers,
            batch * per_sequence,
            BLOCK_SIZE,
            config.num_kv_heads,
            config.head_dim,
            model.dtype,
            model.device,
        )
        self.tables = torch.randperm(batch * per_sequence).view(batch, per_sequence).int()
        self.batch, self.context = batch, context

    def decode(self) -> None:
        """One step that adds a token to every sequence."""
        self._run([1] * self.batch, [self.context + 1] * self.batch, torch.zeros(self.batch, dtype=torch.int64))

    def prefill(self) -> None:
        """One prompt of `context` tokens from nothing, logits of its last row."""
        self._run([self.context], [self.context], torch.arange(self.context))

    def _run(self, query_lens: list[int], kv_lens: list[int], ids: torch.Tensor) -> None:
        metadata, positions = AttentionMetadata.build(query_lens, kv_lens, self.tables, BLOCK_SIZE)
        hidden = self.model.forward(ids, positions, metadata, self.kv)
        last = metadata.query_start[1:].long() - 1
        self.model.compute_logits(hidden[last]).argmax(-1)


class Theirs:
    """The same in transformers."""

    def __init__(self, model: Any, batch: int, context: int) -> None:
        self.model = model
        self.batch, self.context = batch, context
        self.cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            for layer in range(model.config.num_hidden_layers):
                shape = (batch, model.config.num_key_value_heads, context, model.config.hidden_size // 14)
                self.cache.update(torch.zeros(shape, dtype=model.dtype), torch.zeros(shape, dtype=model.dtype), layer)

    @torch.inference_mode()
    def decode(self) -> None:
        """One step; cropping the cache back is a view and costs nothing."""
        ids = torch.zeros(self.batch, 1, dtype=torch.int64)
        self.model(ids, past_key_values=self.cache, logits_to_keep=1).logits[:, -1].float().argmax(-1)
        self.cache.crop(-1)

    @torch.inference_mode()
    def prefill(self) -> None:
        """One prompt from nothing."""
        ids = torch.arange(self.context).unsqueeze(0)
        self.model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].float().argmax(-1)


def interleaved(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each call, taken in turns after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {
        name: {"median_ms": round(statistics.median(values), 2), "fastest_ms": round(min(values), 2)}
        for name, values in times.items()
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one JSON object."""
    device = CPUDevice()
    device.start(num_threads=options.threads)
    folder = checkpoint(options.cache, options.seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    ours = load_model(folder, device=device, dtype=options.dtype)
    load_seconds = time.perf_counter() - start
    gc.collect()
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=ours.dtype).eval()
    decode, prefill = [], []
    for batch in options.batch:
        calls = {
            "penstock": Ours(ours, batch, options.context).decode,
            "transformers": Theirs(theirs, batch, options.context).decode,
        }
        decode.append({"batch": batch, "context": options.context, **interleaved(calls, options.repeats)})
    for prompt in options.prompt:
        calls = {"penstock": Ours(ours, 1, prompt).prefill, "transformers": Theirs(theirs, 1, prompt).prefill}
        prefill.append({"prompt": prompt, **interleaved(calls, max(options.repeats // 3, 2))})
    return {
        "model": "Qwen2.5-0.5B shape, random weights",
        "dtype": ours.config.dtype,
        "device": device.describe(),
        "torch": torch.__version__,
        "load_seconds": round(load_seconds, 2),
        "weights_bytes": ours.num_bytes,
        "load_peak_bytes": peak,
        "decode": decode,
        "prefill": prefill,
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "penstock")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--prompt", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)
    transformers_logging.disable_progress_bar()
    report.write(measure(options))
