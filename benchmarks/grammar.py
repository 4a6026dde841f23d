"""Cost of structured output in a decode step: 8 constrained sequences beside 8 free ones, steps taken in turns.

    python -m benchmarks grammar --tokenizer FOLDER [--cache DIR] [--threads 2] [--batch 8] [--steps 60] [--json FILE]

Model: Qwen2.5-0.5B shape, random weights (benchmarks/checkpoints.py makes it), so outputs are random documents.
`FOLDER` holds Qwen2.5's tokenizer.json; masks are over all 151 936 ids. A step is ModelRunner.execute and the appending
of its tokens, which advances the grammars. `critical path` is the median of what a constrained step takes more than the
free step beside it; on a busy machine rather look at the CPU time of the engine's thread, of a free step and what a
constrained one takes more. The parts that are on the critical path for certain, masks applied to scores and a token
taken by a matcher, are given too. `masks` is the computation that runs beside the forward pass, measured in steps of
its own: wall time of the whole batch, and CPU time of all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import ScheduledSequence, SchedulerOutput
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.grammar.grammar_tokenizer import GrammarTokenizer
from penstock.generation.grammar.matcher_state import CompiledGrammar, MaskWorkers
from penstock.generation.grammar.matching import new_matcher
from penstock.generation.grammar.spec import ConstraintKind
from penstock.generation.grammar.translate import to_lark
from penstock.generation.models.registry import load_model
from penstock.generation.runner.model_runner import ModelRunner
from penstock.generation.sampling.token_masks import TokenMasks

from benchmarks._arguments import be_quiet
from benchmarks._report import Report, percentile
from benchmarks.checkpoints import BLOCK_SIZE, CACHE, QWEN, checkpoint

EOS = (151_645, 151_643)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 60},
        "email": {"type": "string", "format": "email"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["admin", "editor", "viewer"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 8},
        "address": {"$ref": "#/$defs/address"},
    },
    "required": ["name", "age", "role", "tags", "address"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        }
    },
}
CONSTRAINTS: dict[str, tuple[ConstraintKind, str]] = {
    "json_schema": (ConstraintKind.JSON_SCHEMA, json.dumps(PERSON)),
    "json_object": (ConstraintKind.JSON_OBJECT, ""),
    "regex": (ConstraintKind.REGEX, r"([A-Z][a-z]{2,12} ){3,40}(is|was) [0-9]{1,4}(\.[0-9]+)? (km|m|cm)"),
    "grammar": (
        ConstraintKind.GRAMMAR,
        'start: expr\nexpr: term (("+"|"-") term)*\nterm: atom (("*"|"/") atom)*\n'
        'atom: NUMBER | NAME | "(" expr ")"\nNUMBER: /[0-9]{1,9}/\nNAME: /[a-z_]{1,20}/',
    ),
}


class Group:
    """Sequences that decode together."""

    def __init__(self, first_id: int, batch: int, context: int, tables: list[list[int]], grammar: Any) -> None:
        params = SamplingParams(10_000, do_sample=True, temperature=1.0, top_k=50, top_p=0.95, eos_token_ids=EOS)
        self.grammar = grammar
        self.sequences = [
            Sequence(first_id + place, 0, params, first_id + place, [100 + place] * context, context)
            for place in range(batch)
        ]
        for sequence, table in zip(self.sequences, tables, strict=True):
            sequence.block_table = table
            sequence.grammar = grammar and grammar.start(EOS)
        self.documents = 0

    def step(self, runner: ModelRunner, start: int) -> None:
        """Compute from token `start` on and append what is drawn; a document that is complete begins anew."""
        entries = tuple(
            ScheduledSequence(sequence, start, sequence.num_tokens - start, (sequence,)) for sequence in self.sequences
        )
        drawn = runner.execute(SchedulerOutput(entries)).sampled
        for sequence in self.sequences:
            token_id = drawn[sequence.seq_id].token_id
            sequence.append(token_id)
            if sequence.grammar is not None and (sequence.grammar.is_done or token_id in EOS):
                sequence.grammar = self.grammar.start(EOS)
                self.documents += 1


def measure(grammar: CompiledGrammar, runner: ModelRunner, workers: MaskWorkers, options: argparse.Namespace) -> Any:
    """One kind of constraint."""
    batch, context = options.batch, options.context
    blocks = -(-(context + 2 * options.steps + 2) // BLOCK_SIZE)
    tables = [list(range(number * blocks, (number + 1) * blocks)) for number in range(2 * batch)]
    free = Group(0, batch, context, tables[:batch], None)
    bound = Group(batch, batch, context, tables[batch:], grammar)
    times: dict[str, list[float]] = {"free": [], "constrained": []}
    threads: dict[str, list[float]] = {"free": [], "constrained": []}
    masks: list[float] = []
    cpu: list[float] = []
    words = np.zeros((batch, workers.num_words), dtype=np.int32)
    for group in (free, bound):
        group.step(runner, 0)
    turns = [("free", free), ("constrained", bound)]
    for number in range(2 * options.steps):
        for name, group in turns:
            start = group.sequences[0].num_tokens - 1
            own = time.thread_time()
            taken = timed(lambda group=group, start=start: group.step(runner, start))
            own = (time.thread_time() - own) * 1e3
            # The steps between find the lexer's new states made by the fill below.
            if number % 2 == 0:
                times[name].append(taken)
                threads[name].append(own)
        if number % 2:
            turns.reverse()
            continue
        states = [sequence.grammar for sequence in bound.sequences if sequence.grammar is not None]
        before = time.process_time()
        masks.append(timed(lambda states=states: workers.fill(states, words)))
        cpu.append((time.process_time() - before) * 1e3)
    more_ms = statistics.median(ours - theirs for ours, theirs in zip(times["constrained"], times["free"], strict=True))
    more_cpu_ms = statistics.median(
        ours - theirs for ours, theirs in zip(threads["constrained"], threads["free"], strict=True)
    )
    free_cpu_ms = statistics.median(threads["free"])
    free_ms, bound_ms = (statistics.median(times[name]) for name in ("free", "constrained"))
    runner.execute(SchedulerOutput((), released=tuple(range(2 * batch))))
    return {
        "free_step_ms_p50": round(free_ms, 2),
        "constrained_step_ms_p50": round(bound_ms, 2),
        "critical_path_ms": round(more_ms, 2),
        "critical_path_share": round(more_ms / free_ms, 4),
        "engine_thread_free_cpu_ms_p50": round(free_cpu_ms, 2),
        "engine_thread_more_cpu_ms": round(more_cpu_ms, 2),
        "engine_thread_more_cpu_share": round(more_cpu_ms / free_cpu_ms, 4),
        "masks_ms_p50": round(statistics.median(masks), 3),
        "masks_ms_p99": round(percentile(masks, 0.99), 3),
        "masks_cpu_ms_mean": round(statistics.fmean(cpu), 3),
        "masks_cpu_share_of_step": round(statistics.fmean(cpu) / free_ms, 4),
        **parts(bound, words),
        "documents": bound.documents,
    }


def parts(group: Group, words: Any) -> dict[str, float]:
    """Measure the parts of a constrained step that are certainly on the critical path, each by itself."""
    masks = TokenMasks(words, {sequence.seq_id: row for row, sequence in enumerate(group.sequences)})
    scores = torch.zeros(len(group.sequences), QWEN.fields["vocab_size"])
    applied = [timed(lambda: masks.apply(scores.zero_(), group.sequences)) for _ in range(20)]
    zeroed = [timed(scores.zero_) for _ in range(20)]
    taken = []
    for sequence in group.sequences:
        state = sequence.grammar
        if state is None:
            continue
        bits = np.unpackbits(words[group.sequences.index(sequence)].view(np.uint8), bitorder="little")
        token_id = int(np.flatnonzero(bits)[0])
        twins = [state.copy() for _ in range(10)]
        taken += [timed(lambda twin=twin, token_id=token_id: twin.advance(token_id)) for twin in twins]
    return {
        "apply_ms_p50": round(statistics.median(applied) - statistics.median(zeroed), 3),
        "advance_one_ms_p50": round(statistics.median(taken), 4),
    }


def timed(call: Callable[[], object]) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one JSON object."""
    device = CPUDevice()
    device.start(num_threads=options.threads)
    model = load_model(checkpoint("qwen2.5-0.5b", options.cache), device=device, dtype=options.dtype)
    config = model.config
    blocks = 2 * options.batch * -(-(options.context + 2 * options.steps + 2) // BLOCK_SIZE)
    kv = KVCachePool(
        config.num_layers, blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim, model.dtype, model.device
    )
    started = time.perf_counter()
    tokenizer = GrammarTokenizer(options.tokenizer, config.vocab_size)
    tokenizer_seconds = time.perf_counter() - started
    workers = MaskWorkers(config.vocab_size, options.mask_threads)
    runner = ModelRunner(model, kv, masks=workers)
    kinds: dict[str, Any] = {}
    for name, (kind, text) in CONSTRAINTS.items():
        started = time.perf_counter()
        matcher = new_matcher(tokenizer, to_lark(kind, text, ()))
        matcher.compute_bitmask()
        compile_ms = (time.perf_counter() - started) * 1e3
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        grammar = CompiledGrammar(matcher, tokenizer, name)
        kinds[name] = {"compile_ms": round(compile_ms, 2), **measure(grammar, runner, workers, options)}
    return {
        "model": "Qwen2.5-0.5B shape, random weights",
        "tokenizer": f"{options.tokenizer.name}, {config.vocab_size} ids",
        "dtype": config.dtype,
        "device": device.describe(),
        "batch": options.batch,
        "context": options.context,
        "steps": options.steps,
        "mask_threads": options.mask_threads,
        "load_average": round(os.getloadavg()[0], 1),
        "tokenizer_seconds": round(tokenizer_seconds, 2),
        "kinds": kinds,
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with Qwen2.5's tokenizer.json")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mask-threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--steps", type=int, default=60)


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)
    report.write(run(options))
