"""Beam search with B beams beside B independent sequences of the same lengths, on a 0.5 B-shaped random model.

    python -m benchmarks beam [--cache DIR] [--threads 1] [--dtype bfloat16] [--json FILE]

The engine and its runner without a server, greedy (with --sample: sampled, top_k 50), no end-of-sequence id, the prefix
cache off. Runs are taken in turns:

    beams      beam search (beam sampling), one prompt
    together   B sequences from one prompt (n = B), the cheapest that B sequences can be
    apart      B requests with prompts of their own

Seconds of a whole request (of the clock, and of the processor, which neighbours disturb less) and milliseconds of a
decoding step are medians over `--rounds`; ratios are those of rounds.
Peak blocks are what the KV pool holds at most after any step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.decoding_mode import PLAIN
from penstock.generation.core.request import Request
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.runner.model_runner import ModelRunner

from benchmarks._arguments import be_quiet
from benchmarks._report import Report
from benchmarks.checkpoints import BLOCK_SIZE, CACHE, QWEN, checkpoint

KINDS = ("beams", "together", "apart")


class Measured:
    """One engine, used for every run, so that all find the same kernels and memory."""

    def __init__(self, model: CausalLM, options: argparse.Namespace) -> None:
        num_beams, prompt, new_tokens = options.beams, options.prompt, options.new_tokens
        self.num_beams, self.prompt, self.new_tokens = num_beams, prompt, new_tokens
        self.sample: bool = options.sample
        blocks = num_beams * -(-(prompt + new_tokens) // BLOCK_SIZE) + 1
        config = model.config
        kv = KVCachePool(
            config.num_layers, blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim, model.dtype, model.device
        )
        settings = EngineConfig(
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            max_context_tokens=prompt + new_tokens,
            max_batch_tokens=max(512, num_beams),
            prefix_cache=False,
        )
        self.engine = Engine(settings, ModelRunner(model, kv), None)

    def run(self, kind: str, round_number: int) -> dict[str, Any]:
        """Seconds of everything, of each decoding step, and the most blocks held."""
        for request in self._requests(kind, round_number):
            self.engine.add(request)
        peak, steps = 0, []
        cpu = time.process_time()
        start = last = time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
            now = time.perf_counter()
            steps.append(now - last)
            last = now
            peak = max(peak, self.engine.load().kv_blocks_used)
        cpu = time.process_time() - cpu
        step = statistics.median(steps[-self.new_tokens // 2 :])
        return {"seconds": last - start, "cpu": cpu, "step": step, "peak": peak}

    def _requests(self, kind: str, round_number: int) -> list[Request]:
        beams = BeamOptions(self.num_beams) if kind == "beams" else PLAIN
        count = self.num_beams if kind == "together" else 1
        sampling: dict[str, Any] = {"do_sample": True, "top_k": 50} if self.sample else {}
        params = SamplingParams(self.new_tokens, num_return_sequences=count, mode=beams, **sampling)
        return [
            Request(
                request_id=f"{kind}-{round_number}-{number}",
                prompt_token_ids=[
                    (7919 * (number + 1) * place + 13) % QWEN.fields["vocab_size"] for place in range(self.prompt)
                ],
                params=params,
                arrival_time=time.monotonic(),
            )
            for number in range(self.num_beams if kind == "apart" else 1)
        ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All runs, as one JSON object."""
    device = CPUDevice()
    device.start(num_threads=options.threads)
    model = load_model(checkpoint("qwen2.5-0.5b", options.cache, options.seed), device=device, dtype=options.dtype)
    measured = Measured(model, options)
    for kind in KINDS:
        measured.run(kind, -1)
    load_before = os.getloadavg()[0]
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(options.rounds):
        # Another one goes first in every round.
        for kind in (*KINDS[number % 3 :], *KINDS[: number % 3]):
            runs[kind].append(measured.run(kind, number))
    return {
        "model": "Qwen2.5-0.5B shape, random weights",
        "dtype": model.config.dtype,
        "device": device.describe(),
        "threads": options.threads,
        "settings": {name: getattr(options, name) for name in ("beams", "prompt", "new_tokens", "rounds", "sample")},
        "block_size": BLOCK_SIZE,
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "results": {kind: _summary(runs[kind]) for kind in KINDS},
        "time_of_beams_over": {kind: _ratio(runs, kind, "seconds") for kind in KINDS[1:]},
        "cpu_time_of_beams_over": {kind: _ratio(runs, kind, "cpu") for kind in KINDS[1:]},
        "step_of_beams_over": {kind: _ratio(runs, kind, "step") for kind in KINDS[1:]},
    }


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "median_seconds": round(statistics.median(run["seconds"] for run in runs), 3),
        "median_cpu_seconds": round(statistics.median(run["cpu"] for run in runs), 3),
        "median_step_ms": round(statistics.median(run["step"] for run in runs) * 1e3, 2),
        "peak_kv_blocks": max(run["peak"] for run in runs),
    }


def _ratio(runs: dict[str, list[dict[str, Any]]], kind: str, what: str) -> dict[str, float]:
    ratios = sorted(beams[what] / other[what] for beams, other in zip(runs["beams"], runs[kind], strict=True))
    return {
        "median": round(statistics.median(ratios), 3),
        "lowest": round(ratios[0], 3),
        "highest": round(ratios[-1], 3),
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sample", action="store_true", help="sampling in place of greedy search")
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)
    report.write(measure(options))
