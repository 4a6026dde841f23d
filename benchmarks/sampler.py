"""Cost of the sampler per step, beside transformers' own processors and draw on the same logits, in turns in one run.

    python benchmarks/sampler.py [--rows 32] [--vocab 151936] [--threads 1] [--repeats 20] [--out sampler.json]

Two kinds of logits, with bf16 values: `peaked` as a trained model gives (Zipf-like: a few tokens hold most of the
probability) and `flat` as a random model gives (normal, sigma 0.6: the nucleus is a large part of the vocabulary).
Every sequence has a prompt of 512 tokens and gains a token each step. ms per step: the fastest wall time, and the
median CPU time of the process, which other load on the machine hardly changes (compare it with --threads 1).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _report import write
from penstock.generation.engine.sequence import Sequence
from penstock.generation.sampling.params import SamplingParams
from penstock.generation.sampling.sampler import Sampler
from transformers.generation import logits_process as hf

PROMPT = 512
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, repetition 1.05": {"repetition_penalty": 1.05},
    "greedy, logprobs 5": {"top_logprobs": 5},
    "temperature 0.7": {"do_sample": True, "temperature": 0.7},
    "Qwen2.5 defaults": {
        "do_sample": True,
        "repetition_penalty": 1.05,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    },
    "Qwen2.5 defaults, logprobs 5": {
        "do_sample": True,
        "repetition_penalty": 1.05,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "top_logprobs": 5,
    },
    "top_k 50": {"do_sample": True, "top_k": 50},
    "top_p 0.8": {"do_sample": True, "top_p": 0.8},
    "min_p 0.05": {"do_sample": True, "min_p": 0.05},
}


def logits(kind: str, rows: int, vocab: int) -> torch.Tensor:
    """(rows, vocab), values of bf16."""
    torch.manual_seed(0)
    if kind == "flat":
        return (torch.randn(rows, vocab) * 0.6).to(torch.bfloat16).float()
    ranks = torch.stack([torch.randperm(vocab) for _ in range(rows)]) + 1.0
    return (15.0 - 1.6 * ranks.log() + torch.randn(rows, vocab) * 0.5).to(torch.bfloat16).float()


class Ours:
    """A batch of live sequences."""

    def __init__(self, options: dict[str, Any], rows: int, vocab: int) -> None:
        params = SamplingParams(1 << 20, **options)
        prompts = torch.randint(0, vocab, (rows, PROMPT)).tolist()
        self.sequences = [Sequence(i, i, params, i, prompt, PROMPT) for i, prompt in enumerate(prompts)]
        self.sampler = Sampler(torch.device("cpu"))

    def step(self, logits_NV: torch.Tensor) -> None:
        """Sample, and let each sequence grow as the engine does."""
        for sequence, token in zip(self.sequences, self.sampler.sample(logits_NV, self.sequences), strict=True):
            sequence.token_ids.append(token.token_id)


class Transformers:
    """What generate() does with the same options: its processors, softmax, multinomial."""

    def __init__(self, options: dict[str, Any], rows: int, vocab: int) -> None:
        self.ids = torch.randint(0, vocab, (rows, PROMPT))
        self.sampled = bool(options.get("do_sample"))
        kinds: list[tuple[str, Callable[[Any], hf.LogitsProcessor]]] = [
            ("repetition_penalty", hf.RepetitionPenaltyLogitsProcessor),
            ("temperature", hf.TemperatureLogitsWarper),
            ("top_k", hf.TopKLogitsWarper),
            ("top_p", hf.TopPLogitsWarper),
            ("min_p", hf.MinPLogitsWarper),
        ]
        self.processors = hf.LogitsProcessorList([kind(options[name]) for name, kind in kinds if name in options])

    def step(self, logits_NV: torch.Tensor) -> None:
        """One token per row."""
        scores = self.processors(self.ids, logits_NV)
        drawn = torch.multinomial(scores.softmax(-1), 1) if self.sampled else scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, drawn], dim=1)


@torch.inference_mode()
def measure(options: dict[str, Any], given: torch.Tensor, repeats: int) -> dict[str, dict[str, float]]:
    """ms per step of both, taken in turns; the copy of the logits that is consumed is not counted."""
    contenders = {"penstock": Ours(options, *given.shape), "transformers": Transformers(options, *given.shape)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, contender in contenders.items():
            # transformers is many times slower: a few of the repeats keep the run short.
            if name == "transformers" and repeat > repeats // 5 + 1:
                continue
            copy = given.clone()
            wall, cpu = time.perf_counter(), time.process_time()
            contender.step(copy)
            times[name].append(((time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3))
    return {
        name: {
            "wall": round(min(wall for wall, _ in values[1:]), 2),
            "cpu": round(statistics.median(cpu for _, cpu in values[1:]), 2),
        }
        for name, values in times.items()
    }


def main() -> None:
    """Run every case on both kinds of logits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--case", action="append", choices=CASES, help="only these; default: all")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {
        kind: {
            name: measure(options, logits(kind, arguments.rows, arguments.vocab), arguments.repeats)
            for name, options in CASES.items()
            if name in (arguments.case or CASES)
        }
        for kind in ("peaked", "flat")
    }
    settings = {"rows": arguments.rows, "vocab": arguments.vocab, "threads": arguments.threads}
    write("sampler", {"torch": torch.__version__, **settings, "ms_per_step": results}, arguments.out)


if __name__ == "__main__":
    main()
