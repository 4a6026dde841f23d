"""Assisted generation beside the same requests without it, on a model of Qwen2.5-0.5B's shape, through the engine.

    python -m benchmarks assisted [--cache DIR] [--threads 2] [--tokens 96] [--rounds 3] [--concurrent 1 8] [--out FILE]

Random weights agree with nothing by chance, so both constructions are made to be predictable, and acceptance is
reported beside every speed-up: the speed-up is that of this acceptance, and another text or pair of models has another.

lookup   The prompts are a random run of ids, repeated. The random model continues greedily by repeating itself soon:
         a repetitive text, and honestly decoded, but more repetitive than most.
draft    The served model's last layers write `--tail` times as much into the residual stream as they were initialised
         to, and its head is 8 times as sharp, about as a trained model's; the draft model is its first `--draft-layers`
         layers with the same embedding, norm and head. So the two agree often, as a distilled pair does. Greedy, and
         sampled with temperature 0.7 and top_k 20.

Decode speed is output tokens after the first over the time after the first; rounds of plain and assisted requests in
turns, medians. In bfloat16 the rows of a step round by their number, and of 150 000 random scores two are often that
close: how many outputs are the same is reported. The tests assert that all are, in float32; `--dtype float32` shows it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.request import Request
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.runner.drafter import ModelDrafter
from penstock.generation.runner.model_runner import ModelRunner
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging as transformers_logging

from benchmarks._arguments import be_quiet
from benchmarks._report import Report
from benchmarks.checkpoints import BLOCK_SIZE, CACHE, QWEN, checkpoint

PROMPT, NUM_BLOCKS, CONTEXT, SHARPNESS = 64, 1024, 1024, 8
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20}


def predictable_pair(cache: Path, tail: float, layers: int) -> tuple[Path, Path]:
    """Folders of the served model and its draft model, made when they are not there."""
    folder = cache / f"qwen2.5-0.5b-random-tail{tail:g}-{layers}"
    target, draft = folder / "target", folder / "draft"
    if not (draft / "model.safetensors").is_file():
        torch.manual_seed(0)
        shape = {**QWEN.fields, "tie_word_embeddings": False}
        model = AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=torch.bfloat16)
        with torch.no_grad():
            for layer in model.model.layers[layers:]:
                layer.self_attn.o_proj.weight *= tail
                layer.mlp.down_proj.weight *= tail
            model.lm_head.weight *= SHARPNESS
        model.save_pretrained(target)
        small = AutoModelForCausalLM.from_config(
            Qwen2Config(**{**shape, "num_hidden_layers": layers}), dtype=torch.bfloat16
        )
        small.load_state_dict(model.state_dict(), strict=False)
        small.save_pretrained(draft)
    return target, draft


@dataclass(frozen=True)
class Bench:
    """Models on one device, and what a round is."""

    model: CausalLM
    draft: CausalLM | None
    tokens: int
    concurrent: int
    max_draft_rows: int

    def engine(self) -> Engine:
        """Make an engine with pools of its own."""
        config = EngineConfig(NUM_BLOCKS, BLOCK_SIZE, CONTEXT, prefix_cache=False, max_draft_rows=self.max_draft_rows)
        drafter = None
        if self.draft is not None:
            drafter = ModelDrafter(
                runner(self.draft),
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK_SIZE,
                max_context_tokens=CONTEXT,
                max_prefill_tokens=config.max_batch_tokens,
            )
        return Engine(config, runner(self.model), None, drafter=drafter)

    def prompts(self, seed: int, *, repeated: bool) -> list[list[int]]:
        """Random ids; `repeated`: a quarter of them four times."""
        rng = random.Random(seed)
        length = PROMPT // 4 if repeated else PROMPT
        prompts = [[rng.randrange(QWEN.fields["vocab_size"]) for _ in range(length)] for _ in range(self.concurrent)]
        return [prompt * 4 for prompt in prompts] if repeated else prompts


@dataclass
class Round:
    """One run of all requests."""

    speed: float
    accepted: int
    rejected: int
    draft_seconds: float
    steps: int
    ids: list[tuple[int, ...]]


def runner(model: CausalLM) -> ModelRunner:
    """A runner on a pool of its own."""
    config = model.config
    geometry = (config.num_layers, NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return ModelRunner(model, KVCachePool(*geometry, model.dtype, model.device))


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Round:
    """Decode all prompts; time counts from the step after which every request has its first token."""
    before = (engine.stats.accepted_draft_tokens, engine.stats.rejected_draft_tokens)
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, params, time.monotonic()))
    ids: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    first_tokens, started = 0, 0.0
    engine.stats.drain_steps()
    while engine.has_work:
        for output in engine.step():
            ids[output.request.request_id] += [token for delta in output.deltas for token in delta.token_ids]
        if not started and all(ids.values()):
            first_tokens, started = sum(map(len, ids.values())), time.perf_counter()
            engine.stats.drain_steps()
    seconds = time.perf_counter() - started
    steps = engine.stats.drain_steps()
    return Round(
        speed=(sum(map(len, ids.values())) - first_tokens) / seconds,
        accepted=engine.stats.accepted_draft_tokens - before[0],
        rejected=engine.stats.rejected_draft_tokens - before[1],
        draft_seconds=sum(step.draft_seconds for step in steps),
        steps=len(steps),
        ids=[tuple(one) for one in ids.values()],
    )


def compare(bench: Bench, assistance: AssistanceOptions, rounds: int, **options: Any) -> dict[str, Any]:
    """Plain and assisted rounds in turns after one of each to warm up."""
    engine = bench.engine()
    plain = SamplingParams(bench.tokens, ignore_eos=True, **options)
    assisted = SamplingParams(bench.tokens, ignore_eos=True, mode=assistance, **options)
    results: dict[str, list[Round]] = {"plain": [], "assisted": []}
    for number in range(rounds + 1):
        prompts = bench.prompts(number, repeated=not assistance.uses_draft_model)
        for name, params in (("plain", plain), ("assisted", assisted)):
            result = run(engine, prompts, params)
            if number:
                results[name].append(result)
    accepted = sum(one.accepted for one in results["assisted"])
    rejected = sum(one.rejected for one in results["assisted"])
    speeds = {name: statistics.median(one.speed for one in ones) for name, ones in results.items()}
    pairs = [
        a == b
        for one, other in zip(results["plain"], results["assisted"], strict=True)
        for a, b in zip(one.ids, other.ids, strict=True)
    ]
    return {
        "concurrent": bench.concurrent,
        "plain_tokens_per_second": round(speeds["plain"], 2),
        "assisted_tokens_per_second": round(speeds["assisted"], 2),
        "speed_up": round(speeds["assisted"] / speeds["plain"], 2),
        "acceptance": round(accepted / max(accepted + rejected, 1), 3),
        "tokens_per_step": round(
            statistics.mean((bench.tokens * bench.concurrent) / one.steps for one in results["assisted"]), 2
        ),
        "draft_ms_per_step": round(
            1e3 * statistics.mean(one.draft_seconds / one.steps for one in results["assisted"]), 2
        ),
        "same_ids": f"{sum(pairs)} of {len(pairs)}",
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one JSON object."""
    device = CPUDevice()
    device.start(num_threads=options.threads)
    cells: list[dict[str, Any]] = []
    target, draft = predictable_pair(options.cache, options.tail, options.draft_layers)
    random_model = load_model(checkpoint("qwen2.5-0.5b", options.cache), device=device, dtype=options.dtype)
    lookup = AssistanceOptions(prompt_lookup_num_tokens=options.lookup_tokens)
    for concurrent in options.concurrent:
        bench = Bench(random_model, None, options.tokens, concurrent, options.max_draft_rows)
        cells.append({"case": "lookup", **compare(bench, lookup, options.rounds)})
    del random_model, bench
    served = load_model(target, device=device, dtype=options.dtype)
    small = load_model(draft, device=device, dtype=options.dtype)
    drafting = AssistanceOptions(num_assistant_tokens=options.draft_tokens, confidence_threshold=0.0)
    for concurrent in options.concurrent:
        bench = Bench(served, small, options.tokens, concurrent, options.max_draft_rows)
        cells.append({"case": "draft, greedy", **compare(bench, drafting, options.rounds)})
        cells.append({"case": "draft, sampled", **compare(bench, drafting, options.rounds, seed=7, **SAMPLED)})
    return {
        "model": "Qwen2.5-0.5B shape, random weights",
        "device": device.describe(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        **{name: getattr(options, name) for name in ("tail", "draft_layers", "draft_tokens", "lookup_tokens")},
        **{name: getattr(options, name) for name in ("dtype", "tokens", "rounds", "max_draft_rows")},
        "prompt": PROMPT,
        "cells": cells,
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--lookup-tokens", type=int, default=10)
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--tail", type=float, default=0.01)
    parser.add_argument("--max-draft-rows", type=int, default=EngineConfig.max_draft_rows)


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)
    transformers_logging.disable_progress_bar()
    report.write(measure(options))
