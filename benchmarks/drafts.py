"""Drafts without a draft model beside none: prompt lookup, memory, lookahead, all three; on repetitive and varied text.

    python -m benchmarks drafts [--models demo random] [--threads 2] [--tokens 96] [--rounds 5] [--out FILE]

One request at a time, through the engine. Two models: the embedded one, answering questions about numbers, and one of
Qwen2.5-0.5B's shape with random weights in bfloat16.

repetitive   The embedded model lists numbers, greedily: each answer has its own text, all are alike. The random model
             goes on greedily after a run of ids that is repeated in its prompt, and repeats itself soon.
varied       The same models sampled at temperature 3 with a seed of each prompt: hardly any n-gram comes twice, so the
             figure is what drafting costs where there is nothing to win.

Memory is asked after it saw the answers to other prompts of the same kind, as a service has; it never saw the answer
itself. Answers of all kinds in turns, medians; tokens a step are output tokens over steps after the prompt's. The
speed-up is told by the clock and by processor time, which other work on the machine changes less; that one is for
`--threads 1`.
`same_ids` counts answers that are those of plain decoding.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from penstock.common.checkpoint import demo_folder
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.decoding_mode import PLAIN, DecodingMode
from penstock.generation.core.request import Request
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.runner.model_runner import ModelRunner
from tokenizers import Tokenizer
from transformers.utils import logging as transformers_logging

from benchmarks._arguments import be_quiet
from benchmarks._report import Report
from benchmarks.forward import BLOCK_SIZE, SHAPE, checkpoint

NUM_BLOCKS, CONTEXT = 1024, 1024
DRAFTS, WINDOW = 10, 8
KINDS: dict[str, DecodingMode] = {
    "none": PLAIN,
    "prompt lookup": AssistanceOptions(prompt_lookup_num_tokens=DRAFTS),
    "memory": AssistanceOptions(ngram_memory_num_tokens=DRAFTS),
    "lookahead": AssistanceOptions(lookahead_window=WINDOW),
    "all": AssistanceOptions(prompt_lookup_num_tokens=DRAFTS, ngram_memory_num_tokens=DRAFTS, lookahead_window=WINDOW),
}
SAMPLED = {"do_sample": True, "temperature": 3.0}


@dataclass
class Run:
    """One answer."""

    seconds: float
    cpu_seconds: float
    steps: int
    accepted: int
    drafted: int
    ids: tuple[int, ...]


def demo_prompt(number: int) -> list[int]:
    """Ask for a list of numbers, another one for each number."""
    rng = random.Random(number)
    first = rng.randrange(1, 60)
    tokenizer = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    question = f"Write the numbers from {first} to {first + 30}."
    return list(tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids)


def random_prompt(number: int) -> list[int]:
    """Repeat a run of 16 random ids four times."""
    rng = random.Random(number)
    return [rng.randrange(SHAPE["vocab_size"]) for _ in range(16)] * 4


def make_engine(model: CausalLM) -> Engine:
    """An engine with a pool of its own."""
    config, facts = EngineConfig(NUM_BLOCKS, BLOCK_SIZE, CONTEXT, prefix_cache=False), model.config
    geometry = (facts.num_layers, NUM_BLOCKS, BLOCK_SIZE, facts.num_kv_heads, facts.head_dim)
    return Engine(config, ModelRunner(model, KVCachePool(*geometry, model.dtype, model.device)), None)


def run(engine: Engine, prompt: list[int], params: SamplingParams, tenant: str) -> Run:
    """Decode one answer; time and steps count from its first token."""
    stats = engine.stats
    before = stats.accepted_draft_tokens, stats.rejected_draft_tokens
    engine.add(Request("1", prompt, params, time.monotonic(), cache_salt=tenant))
    ids: list[int] = []
    started, cpu_started, first_step = 0.0, 0.0, 0
    while engine.has_work:
        for output in engine.step():
            ids += [token for delta in output.deltas for token in delta.token_ids]
        if not started and ids:
            started, cpu_started, first_step = time.perf_counter(), time.process_time(), stats.steps
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    accepted = stats.accepted_draft_tokens - before[0]
    drafted = accepted + stats.rejected_draft_tokens - before[1]
    return Run(seconds, cpu_seconds, stats.steps - first_step, accepted, drafted, tuple(ids))


def compare(
    model: CausalLM, make_prompt: Callable[[int], list[int]], options: argparse.Namespace, sampling: dict[str, Any]
) -> list[dict[str, Any]]:
    """All kinds in turns."""
    engine = make_engine(model)
    runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    for number in range(-options.past, options.rounds):
        prompt = make_prompt(number + 1000)
        for kind, mode in KINDS.items():
            seed = {"seed": number + 1000} if sampling else {}
            params = SamplingParams(options.tokens, ignore_eos=True, mode=mode, **sampling, **seed)
            # Of each kind its own tenant: no memory knows what another kind made of this prompt.
            result = run(engine, prompt, params, kind)
            if number >= 0:
                runs[kind].append(result)
    plain = statistics.median(one.seconds for one in runs["none"])
    plain_cpu = statistics.median(one.cpu_seconds for one in runs["none"])
    return [
        {
            "drafts": kind,
            "tokens_per_step": round(statistics.mean((len(one.ids) - 1) / one.steps for one in ones), 2),
            "acceptance": round(sum(one.accepted for one in ones) / max(sum(one.drafted for one in ones), 1), 3),
            "tokens_per_second": round((options.tokens - 1) / statistics.median(one.seconds for one in ones), 1),
            "speed_up": round(plain / statistics.median(one.seconds for one in ones), 2),
            "cpu_speed_up": round(plain_cpu / statistics.median(one.cpu_seconds for one in ones), 2),
            "same_ids": f"{sum(a.ids == b.ids for a, b in zip(ones, runs['none'], strict=True))} of {len(ones)}",
        }
        for kind, ones in runs.items()
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one JSON object."""
    device = CPUDevice()
    device.start(num_threads=options.threads)
    cells: list[dict[str, Any]] = []
    for name in options.models:
        folder = demo_folder() if name == "demo" else checkpoint(options.cache, 0)
        model = load_model(folder, device=device, dtype="auto" if name == "demo" else options.dtype)
        for text, sampling in (("repetitive", {}), ("varied", SAMPLED)):
            found = compare(model, demo_prompt if name == "demo" else random_prompt, options, sampling)
            cells += [{"model": name, "text": text, **cell} for cell in found]
    return {
        "device": device.describe(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        **{name: getattr(options, name) for name in ("dtype", "tokens", "rounds", "past")},
        "drafts": DRAFTS,
        "window": WINDOW,
        "cells": cells,
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "penstock")
    parser.add_argument("--models", nargs="+", choices=("demo", "random"), default=["demo", "random"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--past", type=int, default=3, help="answers that a memory saw before the first round")


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)
    transformers_logging.disable_progress_bar()
    report.write(measure(options))
