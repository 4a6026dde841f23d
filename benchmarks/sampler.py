"""Cost of the sampler per step, with and without the C++ kernels, beside transformers on the same logits, in turns.

    python -m benchmarks sampler [--rows 32] [--vocab 151936] [--threads 1] [--repeats 20] [--out sampler.json]
                                 [--kernels torch native] [--without-transformers] [--table]
    python -m benchmarks sampler --operators [--rows 8] [--threads 2] [--repeats 20] [--out operators.json]

Native kernels must have been built (`penstock build-kernels`); without them they are left out.

Two kinds of logits, with bf16 values: `peaked` as a trained model gives (Zipf-like: a few tokens hold most of the
probability) and `flat` as a random model gives (normal, sigma 0.6: the nucleus is a large part of the vocabulary).
Every sequence has a prompt of 512 tokens and gains a token each step. ms per step: the fastest wall time, and the
median CPU time of the process, which other load on the machine hardly changes (compare it with --threads 1).

`--operators`: what each C++ operator of sampling saves of a step beside the same step with torch's in its place, taken
in turns: the difference of the fastest wall times and the median of the differences, in ms (peaked logits).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from penstock.common.environment import cache_folder
from penstock.generation.core.decoding_mode import WatermarkOptions
from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import Fork
from penstock.generation.devices.native import library
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.sampling.drawing import Drawing
from penstock.generation.sampling.native_drawing import NativeDrawing
from penstock.generation.sampling.ops import green_lists
from penstock.generation.sampling.sampler import Sampler
from penstock.generation.sampling.sampling_kernels import NativeSampling, SamplingKernels
from transformers.generation import logits_process as hf

from benchmarks._report import Report

PROMPT = 512
BEAMS = 4
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, repetition 1.05": {"repetition_penalty": 1.05},
    "greedy, logprobs 5": {"top_logprobs": 5},
    "greedy, all penalties": {"repetition_penalty": 1.05, "frequency_penalty": 0.1, "presence_penalty": 0.1},
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
    "top_h 0.7": {"do_sample": True, "top_h": 0.7},
    "typical_p 0.9": {"do_sample": True, "typical_p": 0.9},
    "epsilon_cutoff 3e-4": {"do_sample": True, "epsilon_cutoff": 3e-4},
    "eta_cutoff 2e-3": {"do_sample": True, "eta_cutoff": 2e-3},
    "greedy, no_repeat_ngram_size 3": {"no_repeat_ngram_size": 3},
    "greedy, 200 bad words": {"bad_words_ids": tuple((i, i + 1, i + 2) for i in range(200))},
    "greedy, watermark": {"watermark": WatermarkOptions()},
    "greedy, selfhash watermark": {"watermark": WatermarkOptions(seeding_scheme="selfhash", context_width=4)},
    "beams of 4": {"mode": BeamOptions(4)},
    "beams of 4, repetition 1.05": {"mode": BeamOptions(4), "repetition_penalty": 1.05},
    "beams of 4, sampled, top_k 50": {"mode": BeamOptions(4), "do_sample": True, "top_k": 50},
    "beams of 4, sampled": {"mode": BeamOptions(4), "do_sample": True},
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

    def __init__(self, options: dict[str, Any], rows: int, vocab: int, kernels: SamplingKernels) -> None:
        params = SamplingParams(1 << 20, **options)
        prompts = torch.randint(0, vocab, (rows, PROMPT)).tolist()
        self.sequences = [Sequence(i, i, params, i, prompt, PROMPT) for i, prompt in enumerate(prompts)]
        self.sampler = Sampler(torch.device("cpu"), kernels)

    def step(self, logits_NV: torch.Tensor) -> None:
        """Sample, and let each sequence grow as the engine does."""
        # The same logits give the same tokens in every step here: nothing that was asked before comes again in earnest.
        green_lists._answers.clear()
        for sequence, token in zip(self.sequences, self.sampler.sample(logits_NV, self.sequences), strict=True):
            sequence.token_ids.append(token.token_id)


class OurBeams:
    """Requests of four beams, of which two go on in each step and two are forked anew."""

    def __init__(self, options: dict[str, Any], rows: int, vocab: int, kernels: SamplingKernels) -> None:
        self.params = SamplingParams(1 << 20, **options)
        self.sampler = Sampler(torch.device("cpu"), kernels)
        self.next_id = itertools.count()
        self.requests = []
        for _ in range(rows // BEAMS):
            prompt = torch.randint(0, vocab, (PROMPT,)).tolist()
            self.requests.append([self._beam(prompt, slot) for slot in range(BEAMS)])

    def step(self, logits_NV: torch.Tensor) -> None:
        """Draw candidates, fork, and drop."""
        tokens = iter(self.sampler.sample(logits_NV, [beam for beams in self.requests for beam in beams]))
        forks, dropped = [], []
        for place, beams in enumerate(self.requests):
            found = [token.candidates for token in itertools.islice(tokens, BEAMS)]
            kept = beams[: BEAMS // 2]
            children = [self._beam(beam.token_ids, BEAMS // 2 + slot) for slot, beam in enumerate(kept)]
            forks += [
                Fork(beam.seq_id, child.seq_id, beam.num_tokens) for beam, child in zip(kept, children, strict=True)
            ]
            dropped += [beam.seq_id for beam in beams[BEAMS // 2 :]]
            self.requests[place] = [*kept, *children]
            for beam, candidates in zip(self.requests[place], found, strict=True):
                beam.token_ids.append(candidates.token_ids[0] if candidates is not None else 0)
        self.sampler.fork(forks)
        self.sampler.release(dropped)

    def _beam(self, token_ids: list[int], slot: int) -> Sequence:
        spec = DrawSpec(DrawKind.CANDIDATES, 2 * BEAMS, log_softmax=True)
        if self.params.do_sample:
            spec.gumbel_slot = slot
        return Sequence(next(self.next_id), 0, self.params, 0, list(token_ids), PROMPT, draw=spec)


class Transformers:
    """The work of generate() with the same options: its processors, softmax, multinomial."""

    def __init__(self, options: dict[str, Any], rows: int, vocab: int) -> None:
        self.ids = torch.randint(0, vocab, (rows, PROMPT))
        self.sampled = bool(options.get("do_sample"))
        self.beams = "mode" in options
        kinds: list[tuple[str, Callable[[Any], hf.LogitsProcessor]]] = [
            ("repetition_penalty", hf.RepetitionPenaltyLogitsProcessor),
            ("no_repeat_ngram_size", hf.NoRepeatNGramLogitsProcessor),
            ("bad_words_ids", lambda words: hf.NoBadWordsLogitsProcessor([list(word) for word in words])),
            ("temperature", hf.TemperatureLogitsWarper),
            ("top_h", hf.TopHLogitsWarper),
            ("top_k", hf.TopKLogitsWarper),
            ("top_p", hf.TopPLogitsWarper),
            ("min_p", hf.MinPLogitsWarper),
            ("typical_p", hf.TypicalLogitsWarper),
            ("epsilon_cutoff", hf.EpsilonLogitsWarper),
            ("eta_cutoff", hf.EtaLogitsWarper),
            ("watermark", lambda mark: _watermark(mark, vocab)),
        ]
        self.processors = hf.LogitsProcessorList([kind(options[name]) for name, kind in kinds if name in options])

    def step(self, logits_NV: torch.Tensor) -> None:
        """One token per row, or the candidates of each request's beams."""
        scores = self.processors(self.ids, logits_NV.log_softmax(-1) if self.beams else logits_NV)
        if self.beams:
            drawn = self._of_beams(scores)
        elif self.sampled:
            drawn = torch.multinomial(scores.softmax(-1), 1)
        else:
            drawn = scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, drawn], dim=1)

    def _of_beams(self, scores_NV: torch.Tensor) -> torch.Tensor:
        flat = scores_NV.reshape(-1, BEAMS * scores_NV.shape[1])
        picked = torch.multinomial(flat.softmax(-1), 2 * BEAMS) if self.sampled else flat.topk(2 * BEAMS, dim=1).indices
        return (picked[:, :BEAMS] % scores_NV.shape[1]).reshape(-1, 1)


def _watermark(mark: WatermarkOptions, vocab: int) -> hf.WatermarkLogitsProcessor:
    scheme = {"seeding_scheme": mark.seeding_scheme, "context_width": mark.context_width}
    return hf.WatermarkLogitsProcessor(vocab, "cpu", mark.greenlist_ratio, mark.bias, **scheme)


Contender = Ours | OurBeams | Transformers


Kernels = dict[str, SamplingKernels]


@torch.inference_mode()
def measure(
    options: dict[str, Any], given: torch.Tensor, repeats: int, kernels: Kernels, *, has_reference: bool
) -> dict[str, dict[str, float]]:
    """ms per step of each, taken in turns; the copy of the logits that is consumed is not counted."""
    ours = OurBeams if "mode" in options else Ours
    contenders: dict[str, Contender] = {name: ours(options, *given.shape, kind) for name, kind in kernels.items()}
    if has_reference:
        contenders["transformers"] = Transformers(options, *given.shape)
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


def usable_kernels(wanted: list[str]) -> Kernels:
    """Return those of `wanted` that this machine has."""
    usable: Kernels = {"torch": SamplingKernels()}
    if "native" in wanted:
        instruction_set = library.load(Path(cache_folder()))
        if instruction_set is None:
            print("no native kernels: run `penstock build-kernels`", file=sys.stderr)
        else:
            usable["native"] = NativeSampling()
    return {name: kind for name, kind in usable.items() if name in wanted}


def _totals(scores_NV: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
    return torch.tensor(SamplingKernels().log_totals(scores_NV, rows_R.tolist()), dtype=torch.float64)


OPERATORS = torch.ops.penstock
# By operator: the name that callers use, its replacement there, and the cases that it is for.
REPLACEMENTS: dict[str, tuple[Any, str, Callable[..., Any], tuple[str, ...]]] = {
    "log_totals": (OPERATORS, "log_totals", _totals, ("greedy, logprobs 5", "beams of 4, repetition 1.05")),
    "draw_rows": (
        NativeDrawing,
        "sampled",
        Drawing.sampled,
        ("temperature 0.7", "Qwen2.5 defaults", "top_k 50", "top_p 0.8", "min_p 0.05"),
    ),
    "warp_rows": (NativeDrawing, "warp", Drawing.warp, ("beams of 4, sampled, top_k 50", "beams of 4, sampled")),
    "top_noisy_scores": (
        NativeSampling,
        "top_noisy",
        SamplingKernels.top_noisy,
        ("beams of 4, sampled, top_k 50", "beams of 4, sampled"),
    ),
    "in_permutation_head": (NativeSampling, "in_head", SamplingKernels.in_head, ("greedy, selfhash watermark",)),
}


@torch.inference_mode()
def measure_operator(name: str, case: str, given: torch.Tensor, repeats: int) -> dict[str, float]:
    """ms of a step with the operator and without it, and what it saves."""
    where, attribute, other, _ = REPLACEMENTS[name]
    ours = OurBeams if "beams" in CASES[case] else Ours
    contenders = [ours(CASES[case], *given.shape, NativeSampling()) for _ in range(2)]
    times: list[tuple[float, float]] = []
    for repeat in range(repeats + 2):
        took = [0.0, 0.0]
        for place in (0, 1) if repeat % 2 else (1, 0):
            copy = given.clone()
            with mock.patch.object(where, attribute, other) if place else contextlib.nullcontext():
                start = time.perf_counter()
                contenders[place].step(copy)
                took[place] = (time.perf_counter() - start) * 1e3
        times.append((took[0], took[1]))
    native, torchs = (np.array(column[2:]) for column in zip(*times, strict=True))
    return {
        "native": round(float(native.min()), 3),
        "without": round(float(torchs.min()), 3),
        "saved_fastest": round(float(torchs.min() - native.min()), 3),
        "saved_median": round(float(np.median(torchs - native)), 3),
    }


def measure_operators(rows: int, vocab: int, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Measure every operator in the cases that it is for; beams are of requests of four."""
    given = logits("peaked", rows, vocab)
    beams = logits("peaked", max(rows, BEAMS), vocab)
    return {
        name: {
            case: measure_operator(name, case, beams if "beams" in CASES[case] else given, repeats) for case in cases
        }
        for name, (_, _, _, cases) in REPLACEMENTS.items()
    }


def print_table(results: dict[str, dict[str, dict[str, dict[str, float]]]]) -> None:
    """Median CPU ms per step as the table of docs/guide/performance.md."""
    columns = [(kind, name) for kind, cases in results.items() for name in next(iter(cases.values()))]
    print("| options | " + " | ".join(f"{kind}, {name}" for kind, name in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for case in next(iter(results.values())):
        print(f"| {case} | " + " | ".join(str(results[kind][case][name]["cpu"]) for kind, name in columns) + " |")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--kernels", nargs="+", choices=("torch", "native"), default=["torch", "native"])
    parser.add_argument("--without-transformers", action="store_true", help="only our own")
    parser.add_argument("--table", action="store_true", help="print a table as well")
    parser.add_argument("--case", action="append", choices=CASES, help="only these; default: all")
    parser.add_argument("--operators", action="store_true", help="what each C++ operator saves of a step")


def main(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    torch.set_num_threads(arguments.threads)
    kernels = usable_kernels(arguments.kernels)
    if arguments.operators:
        if "native" not in kernels:
            sys.exit("there are no native kernels to measure")
        saved = measure_operators(arguments.rows, arguments.vocab, arguments.repeats)
        facts = {"rows": arguments.rows, "vocab": arguments.vocab, "threads": arguments.threads}
        report.write({"torch": torch.__version__, **facts, "ms_per_step": saved})
        return
    has_reference = not arguments.without_transformers
    results = {
        kind: {
            name: measure(
                options,
                logits(kind, arguments.rows, arguments.vocab),
                arguments.repeats,
                kernels,
                has_reference=has_reference,
            )
            for name, options in CASES.items()
            if name in (arguments.case or CASES)
        }
        for kind in ("peaked", "flat")
    }
    settings = {"rows": arguments.rows, "vocab": arguments.vocab, "threads": arguments.threads}
    report.write({"torch": torch.__version__, **settings, "ms_per_step": results})
    if arguments.table:
        print_table(results)
