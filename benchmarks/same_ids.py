"""Ids of real models in every number format: the same alone, in a crowd, in chunks, after preemptions and prefix hits.

    python -m benchmarks same_ids [--models smollm2-135m gemma3-270m] [--formats bf16 int8 …] [--requests 100]
    python -m benchmarks same_ids --json FILE    # stopped and started again, it goes on behind the last whole cell

Requests have prompts of 8 to 64 tokens of data/prose.txt, every third the beginning of another one's; half are greedy,
half are sampled. Each is answered alone: its prompt in one step, in a pool with room. Then all are answered together,
joining one after another, in a pool so small that some are preempted, with prompts cut into chunks and cached prefixes.
A comparison is one request's ids, alone and in the crowd. `gguf` is the published file in its blocks. The kernels
promise equality in every format; the row says how many differ, how many preemptions and steps with rows of prompts
there were, and the tokens of prefix hits.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common.checkpoint import resolve_model
from penstock.evaluation.documents import documents_of
from penstock.evaluation.number_format import NumberFormat
from penstock.generation.attention.kv_cache import KVCachePool, kv_cache_dtype
from penstock.generation.core.decoding_mode import PLAIN
from penstock.generation.core.request import Request
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.engine import Engine
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import load_model
from penstock.generation.runner.model_runner import ModelRunner

from benchmarks._arguments import at_least, be_quiet, refuse
from benchmarks._report import STDOUT, Report, Table, environment
from benchmarks.accuracy_real import PROSE
from benchmarks.checkpoints import CACHE
from benchmarks.real_models import MODELS, bf16_folder, gguf_file

BLOCK_SIZE, CONTEXT, LONGEST, SHORTEST = 4, 160, 64, 8
FORMATS = {
    f"{name}{', KV int8' * (kv == 'int8')}": NumberFormat(dtype, quantization, kv)
    for name, dtype, quantization in (
        ("float32", "float32", "none"),
        ("bf16", "bfloat16", "none"),
        ("int8", "bfloat16", "int8"),
        ("int8-groups", "bfloat16", "int8-groups"),
        ("int4", "bfloat16", "int4"),
        ("gguf", "bfloat16", "auto"),
    )
    for kv in ("auto", "int8")
}
COLUMNS = ("model", "format", "comparisons", "different", "preemptions", "steps with prompts", "prefix hits", "seconds")


@dataclass(frozen=True)
class Answers:
    """Ids of all requests, in order, and what the engines did."""

    ids: list[tuple[int, ...]]
    preemptions: int
    prompt_steps: int
    prefix_hit_tokens: int


def model_folder(name: str, format: NumberFormat, cache: Path) -> Path:
    """Return the folder that a format is loaded from: of a file in its blocks that which a start makes of it."""
    if format.quantization == "auto":
        return Path(resolve_model(str(gguf_file(name, cache))))
    return bf16_folder(name, cache)


def prompts(folder: Path, count: int) -> list[list[int]]:
    """Cut the prose into prompts; every third begins as the one before."""
    text = documents_of(folder, PROSE.read_text(encoding="utf-8"), LONGEST * count, LONGEST)
    rng, found = random.Random(count), list[list[int]]()
    for number in range(count):
        ids = list(text[number % len(text)])
        length = rng.randint(SHORTEST, LONGEST)
        if number % 3 == 2:
            shared = found[-1][: max(1, len(found[-1]) // 2)]
            ids = shared + ids
        found.append(ids[:length])
    return found


def requests_of(prompts: list[list[int]], tokens: int) -> list[Request]:
    """Make a request for each prompt, with options of its own."""
    return [
        Request(str(number), ids, SamplingParams(tokens, mode=PLAIN, ignore_eos=True, **_sampling(number)), 0.0)
        for number, ids in enumerate(prompts)
    ]


def _sampling(number: int) -> dict[str, Any]:
    return {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "seed": number} if number % 2 else {}


class Crowds:
    """Engines over one model and pool."""

    def __init__(self, model: LanguageModel, format: NumberFormat, tokens: int) -> None:
        self._model, self._format = model, format
        self._most = -(-(LONGEST + tokens) // BLOCK_SIZE)

    def _engine(self, num_blocks: int, batch_tokens: int, *, prefix_cache: bool) -> Engine:
        model = self._model
        geometry = (model.config.num_layers, num_blocks, BLOCK_SIZE, model.num_kv_heads, model.config.head_dim)
        dtype = kv_cache_dtype(self._format.kv_cache_dtype, model.dtype)
        config = EngineConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_context_tokens=CONTEXT,
            max_batch_tokens=batch_tokens,
            max_running_sequences=8,
            prefix_cache=prefix_cache,
            reserve_share=0.0,
        )
        return Engine(config, ModelRunner(model, KVCachePool(*geometry, dtype, model.device)), None)

    def alone(self, requests: list[Request]) -> Answers:
        """Answer one after the other, each prompt in one step, without a prefix cache."""
        engine = self._engine(self._most + 1, 4 * LONGEST, prefix_cache=False)
        ids = [_answer(engine, [one])[one.request_id] for one in requests]
        return Answers(ids, engine.stats.preemptions, 0, engine.stats.prefix_hit_tokens)

    def together(self, requests: list[Request]) -> Answers:
        """Answer all together: eight at a time, in a pool for about three, in steps of 24 tokens."""
        engine = self._engine(3 * self._most, 24, prefix_cache=True)
        found = _answer(engine, requests)
        with_prompts = sum(sample.num_tokens > sample.num_sequences for sample in engine.stats.drain_steps())
        return Answers(
            [found[one.request_id] for one in requests],
            engine.stats.preemptions,
            with_prompts,
            engine.stats.prefix_hit_tokens,
        )


def _answer(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    """Add a request every other step, and answer all."""
    waiting = list(reversed(requests))
    found: dict[str, list[int]] = {one.request_id: [] for one in requests}
    turn = 0
    while waiting or engine.has_work:
        if waiting and turn % 2 == 0:
            engine.add(waiting.pop())
        turn += 1
        for output in engine.step():
            for delta in output.deltas:
                found[output.request.request_id] += delta.token_ids
    return {name: tuple(ids) for name, ids in found.items()}


def compare(model: LanguageModel, format: NumberFormat, prompts: list[list[int]], tokens: int) -> tuple[int, Answers]:
    """Return the number of requests with other ids in the crowd than alone, and the crowd's answers."""
    crowds = Crowds(model, format, tokens)
    alone = crowds.alone(requests_of(prompts, tokens))
    together = crowds.together(requests_of(prompts, tokens))
    return sum(one != other for one, other in zip(alone.ids, together.ids, strict=True)), together


def rows_of(path: Path | None, options: argparse.Namespace) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of an earlier run with the same requests at the same commit, by model and format."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None and path != STDOUT else {}
    except FileNotFoundError:
        return {}
    except ValueError:
        refuse(f"--json {path}: is there, and is not JSON")
    about = {"requests": options.requests, "tokens": options.tokens}
    is_same = found.get("benchmark") == "same_ids" and about.items() <= found.items()
    if not is_same or found["environment"]["commit"] != environment()["commit"]:
        return {}
    return {(row["model"], row["format"]): row for row in found["rows"]}


def measure(
    options: argparse.Namespace, table: Table, save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Return a row for each model and format, printed as they come; `save` gets those so far."""
    known = rows_of(options.json, options)
    device = CPUDevice()
    device.start(num_threads=options.threads)
    rows = []
    for name in options.models:
        asked = prompts(bf16_folder(name, options.cache), options.requests)
        for label in options.formats:
            if (name, label) in known:
                rows.append(known[name, label])
                table.row(*rows[-1].values())
                continue
            format = FORMATS[label]
            began = time.monotonic()
            folder = model_folder(name, format, options.cache)
            model = load_model(folder, dtype=format.dtype, quantization=format.quantization, device=device)
            different, crowd = compare(model, format, asked, options.tokens)
            seconds = round(time.monotonic() - began, 1)
            figures = (len(asked), different, crowd.preemptions, crowd.prompt_steps, crowd.prefix_hit_tokens, seconds)
            table.row(name, label, *figures)
            rows.append({"model": name, "format": label, **dict(zip(COLUMNS[2:], figures, strict=True))})
            # Each takes minutes: a run that is stopped leaves what it has.
            save(rows)
            del model
    return rows


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--cache", type=Path, default=CACHE, help="of the models (default: %(default)s)")
    parser.add_argument("--requests", type=at_least(1), default=100, help="of each cell (default: %(default)s)")
    parser.add_argument("--tokens", type=at_least(2), default=24, help="of an answer (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)


def main(options: argparse.Namespace, report: Report) -> int:
    """Compare, and report it. Return 1 when an id differs."""
    be_quiet(options.threads)
    table = report.table(COLUMNS)
    rows = measure(options, table, lambda rows: report.save_so_far({**report.settings, "rows": rows}))
    report.save({**report.settings, "rows": rows})
    return int(any(row["different"] for row in rows))
