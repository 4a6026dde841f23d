"""Drafts beside none: prompt lookup, memory, lookahead, all three; a real model's quantised self, a trained head.

    python -m benchmarks drafts [--models smollm2-135m demo random] [--threads 2] [--tokens 96] [--rounds 5]

One request at a time, through the engine. Three models: SmolLM2 with its real weights (real_models.py), the embedded
one, answering questions about numbers, and one of Qwen2.5-0.5B's shape with random weights in bfloat16.

code, summary, chat
             The real model answers data/draft_prompts.json greedily, chat sampled at temperature 0.7, too, up to its
             end: one text for each prompt, and memory saw the answers to the prompts before it.
repetitive   The embedded model lists numbers, greedily: each answer has its own text, all are alike. The random model
             goes on greedily after a run of ids that is repeated in its prompt, and repeats itself soon.
varied       The same models sampled at temperature 3 with a seed of each prompt: hardly any n-gram comes twice, so the
             figure is what drafting costs where there is nothing to win.

Memory is asked after it saw the answers to other prompts of the same kind, as a service has; it never saw the answer
itself. Answers of all kinds in turns, medians; tokens a step are output tokens over steps after the prompt's. The
speed-up is told by the clock and by processor time, which other work on the machine changes less; that one is for
`--threads 1`.
`same_ids` counts answers that are those of plain decoding. The embedded model has its draft head, too, which answers
questions of other kinds (`questions`). With `--head` the real model has one, too, in place of the other drafts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from penstock.common.checkpoint import demo_folder, demo_head_folder
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.decoding_mode import PLAIN, DecodingMode
from penstock.generation.core.request import Request
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.draft_head import DraftHead
from penstock.generation.models.eagle3 import load_eagle3
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import load_model, read_model_config
from penstock.generation.runner.drafter import ModelDrafter
from penstock.generation.runner.head_drafter import HeadDrafter
from penstock.generation.runner.model_runner import ModelRunner
from penstock.generation.sampling.sampling_kernels import SamplingKernels
from tokenizers import Tokenizer
from transformers.utils import logging as transformers_logging

from benchmarks._arguments import be_quiet
from benchmarks._report import Report
from benchmarks.checkpoints import BLOCK_SIZE, CACHE, QWEN, checkpoint
from benchmarks.real_models import bf16_folder

NUM_BLOCKS, CONTEXT = 1024, 1024
DRAFTS, WINDOW = 10, 8
KINDS: dict[str, DecodingMode] = {
    "none": PLAIN,
    "prompt lookup": AssistanceOptions(prompt_lookup_num_tokens=DRAFTS),
    "memory": AssistanceOptions(ngram_memory_num_tokens=DRAFTS),
    "lookahead": AssistanceOptions(lookahead_window=WINDOW),
    "all": AssistanceOptions(prompt_lookup_num_tokens=DRAFTS, ngram_memory_num_tokens=DRAFTS, lookahead_window=WINDOW),
}
REAL, SELF, HEAD = "smollm2-135m", "quantised self", "trained head"
SAMPLED = {"do_sample": True, "temperature": 3.0}
CHATTED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
QUESTIONS = (
    *("Who are you?", "What is Penstock?", "Spell violin.", "Write the numbers from 20 to 50.", "What is 13 + 6?"),
    *("What is the capital of France?", "Tell me about paged attention.", "Spell the word river backwards."),
)
PROMPTS = Path(__file__).with_name("data") / "draft_prompts.json"
MakePrompt = Callable[[int], list[int]]


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


def question_prompt(number: int) -> list[int]:
    """Ask one of the questions that the embedded model knows, in turns."""
    tokenizer = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    question = QUESTIONS[number % len(QUESTIONS)]
    return list(tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids)


def random_prompt(number: int) -> list[int]:
    """Repeat a run of 16 random ids four times."""
    rng = random.Random(number)
    return [rng.randrange(QWEN.fields["vocab_size"]) for _ in range(16)] * 4


def chat_prompt(folder: Path, text: str) -> MakePrompt:
    """Return the maker of the prompts of one kind, in SmolLM2's form of a chat."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    asked = json.loads(PROMPTS.read_text(encoding="utf-8"))[text]

    def make(number: int) -> list[int]:
        question = asked[number % len(asked)]
        turns = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return list(tokenizer.encode(turns, add_special_tokens=False).ids)

    return make


def runner(model: LanguageModel, kernels: SamplingKernels, tap: HeadDrafter | None = None) -> ModelRunner:
    """A runner on a pool of its own."""
    facts = model.config
    geometry = (facts.num_layers, NUM_BLOCKS, BLOCK_SIZE, facts.num_kv_heads, facts.head_dim)
    return ModelRunner(model, KVCachePool(*geometry, model.dtype, model.device), kernels=kernels, tap=tap)


def make_engine(
    model: LanguageModel, draft: LanguageModel | None, head: DraftHead | None, kernels: SamplingKernels
) -> Engine:
    """An engine with pools of its own; `kernels` are the device's, as a service has them."""
    config = EngineConfig(NUM_BLOCKS, BLOCK_SIZE, CONTEXT, prefix_cache=False)
    drafter: ModelDrafter | HeadDrafter | None = None
    if head is not None:
        facts = head.config
        kv = KVCachePool(1, NUM_BLOCKS, BLOCK_SIZE, facts.num_kv_heads, facts.head_dim, head.dtype, head.device)
        assert isinstance(model, CausalLM)
        head.share(model)
        drafter = HeadDrafter(head, kv, model.config.vocab_size, kernels=kernels, masks=None)
        return Engine(config, runner(model, kernels, drafter), None, drafter=drafter)
    if draft is not None:
        drafter = ModelDrafter(
            runner(draft, kernels),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_context_tokens=CONTEXT,
            max_prefill_tokens=config.max_batch_tokens,
        )
    return Engine(config, runner(model, kernels), None, drafter=drafter)


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
    model: LanguageModel,
    draft: LanguageModel | None,
    make_prompt: MakePrompt,
    options: argparse.Namespace,
    sampling: dict[str, Any],
    ends: dict[str, Any],
    kernels: SamplingKernels,
    head: DraftHead | None = None,
) -> list[dict[str, Any]]:
    """All kinds in turns; with a head only none and its own."""
    engine = make_engine(model, draft, head, kernels)
    kinds = {**KINDS, SELF: AssistanceOptions()} if draft is not None else KINDS
    if head is not None:
        kinds = {"none": PLAIN, HEAD: AssistanceOptions(num_assistant_tokens=DRAFTS)}
    runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
    for number in range(-options.past, options.rounds):
        prompt = make_prompt(number + 1000)
        for kind, mode in kinds.items():
            seed: dict[str, Any] = {"seed": number + 1000} if sampling else {}
            params = SamplingParams(options.tokens, mode=mode, **ends, **sampling, **seed)
            # Of each kind its own tenant: no memory knows what another kind made of this prompt.
            result = run(engine, prompt, params, kind)
            if number >= 0:
                runs[kind].append(result)

    def speed_up(ones: list[Run], figure: str) -> float:
        """Median over the prompts, whose answers have other lengths."""
        pairs = zip(runs["none"], ones, strict=True)
        ratios: list[float] = [getattr(plain, figure) / getattr(one, figure) for plain, one in pairs]
        return round(statistics.median(ratios), 2)

    return [
        {
            "drafts": kind,
            "tokens_per_step": round(statistics.mean((len(one.ids) - 1) / one.steps for one in ones), 2),
            "acceptance": round(sum(one.accepted for one in ones) / max(sum(one.drafted for one in ones), 1), 3),
            "tokens_per_second": round(statistics.median((len(one.ids) - 1) / one.seconds for one in ones), 1),
            "speed_up": speed_up(ones, "seconds"),
            "cpu_speed_up": speed_up(ones, "cpu_seconds"),
            "same_ids": f"{sum(a.ids == b.ids for a, b in zip(ones, runs['none'], strict=True))} of {len(ones)}",
        }
        for kind, ones in runs.items()
    ]


def real_cells(device: CPUDevice, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Cells of a real model, with its quantised self as the draft model."""
    folder = bf16_folder(REAL, options.cache)
    model = load_model(folder, device=device, dtype=options.dtype, quantization=options.quantization)
    draft = load_model(folder, device=device, dtype=options.dtype, quantization=options.draft_quantization)
    ends = {"eos_token_ids": tuple(read_model_config(folder).eos_token_ids)}
    kernels = device.sampling_kernels()
    cells = []
    for text, sampling in (("code", {}), ("summary", {}), ("chat", {}), ("chat", CHATTED)):
        found = compare(model, draft, chat_prompt(folder, text), options, sampling, ends, kernels)
        cells += [{"model": REAL, "text": text + ", sampled" * bool(sampling), **cell} for cell in found]
    return cells


def head_cells(device: CPUDevice, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Cells of a real model with a trained head."""
    folder = bf16_folder(REAL, options.cache)
    model = load_model(folder, device=device, dtype=options.dtype, quantization=options.quantization)
    head = load_eagle3(options.head, model.config, device, model.dtype, options.quantization)
    ends = {"eos_token_ids": tuple(read_model_config(folder).eos_token_ids)}
    kernels = device.sampling_kernels()
    cells = []
    for text, sampling in (("code", {}), ("summary", {}), ("chat", {}), ("chat", CHATTED)):
        found = compare(model, None, chat_prompt(folder, text), options, sampling, ends, kernels, head)
        cells += [{"model": REAL, "text": text + ", sampled" * bool(sampling), **cell} for cell in found]
    return cells


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one JSON object."""
    device = CPUDevice()
    device.start(num_threads=options.threads)
    cells: list[dict[str, Any]] = []
    kernels = device.sampling_kernels()
    for name in options.models:
        if name == REAL:
            cells += real_cells(device, options) if options.head is None else head_cells(device, options)
            continue
        folder = demo_folder() if name == "demo" else checkpoint("qwen2.5-0.5b", options.cache)
        model = load_model(folder, device=device, dtype="auto" if name == "demo" else options.dtype)
        for text, sampling in (("repetitive", {}), ("varied", SAMPLED)):
            make = demo_prompt if name == "demo" else random_prompt
            found = compare(model, None, make, options, sampling, {"ignore_eos": True}, kernels)
            cells += [{"model": name, "text": text, **cell} for cell in found]
        if name == "demo":
            head = load_eagle3(demo_head_folder(), model.config, device, model.dtype, "none")
            ends = {"eos_token_ids": tuple(read_model_config(folder).eos_token_ids)}
            for text, sampling in (("questions", {}), ("questions, sampled", CHATTED)):
                found = compare(model, None, question_prompt, options, sampling, ends, kernels, head)
                cells += [{"model": name, "text": text, **cell} for cell in found]
    return {
        "device": device.describe(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        **{
            name: getattr(options, name) for name in ("dtype", "quantization", "draft_quantization", "tokens", "rounds")
        },
        "past": options.past,
        "drafts": DRAFTS,
        "window": WINDOW,
        "cells": cells,
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--models", nargs="+", choices=(REAL, "demo", "random"), default=[REAL])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--head", type=Path, help="folder of a trained head of the real model, in place of the others")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none", help="of the real model (default: %(default)s)")
    parser.add_argument("--draft-quantization", default="int4", help="of its quantised self (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--past", type=int, default=3, help="answers that a memory saw before the first round")


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)
    transformers_logging.disable_progress_bar()
    report.write(measure(options))
