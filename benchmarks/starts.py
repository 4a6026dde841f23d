"""Times of starts: each model family and each tokenizer, with default flags, alone and in two processes.

    python -m benchmarks starts --tokenizers ../shared/data/tokenizers/*
    python -m benchmarks starts --models ./SmolLM2.gguf --write dev/log/starts.md
    python -m benchmarks starts --only tokenizers --most-seconds 2 --out starts.json

A family is a tiny random checkpoint with the tokenizer of the demo model: what its start takes is what a start takes
beside reading weights. Each start is a `penstock serve generation` or `penstock serve tokenizer` of its own, on free
ports, by its READY line and its log's `loaded`; with --tensor-parallel 2 where the model can be spread. The same
request goes to both: their ids must be equal. Seconds of the processor are beside those of the clock: on a busy
machine only they mean something. `many added tokens` is a made tokenizer with as many added tokens as
Gemma 3 has. A tokenizer's times are of the processor: transformers' own reading, which is the same for everybody and
which a second start does not do, and the work behind it. --most-seconds bounds that work, and the processor's seconds
of a load beside its weights; exit status 1 past it, or where ids differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
import psutil
from factories.models.checkpoints import tiny_checkpoint
from factories.servers import stack
from penstock.common.checkpoint import demo_folder
from penstock.generation.models.registry import FAMILIES
from penstock.tokenizer.load_process import load
from penstock.tokenizer.service import _detokenizers
from penstock.tokenizer.tokenizer import TextTokenizer, Vocabulary
from tokenizers import AddedToken, Tokenizer

from benchmarks._arguments import refuse
from benchmarks._greedy_answer import ids_of
from benchmarks._report import Report

# Of Gemma 3.
ADDED_TOKENS = 6384
PARTS = ("tokenizers", "families", "models")
_COLUMNS = (
    *("what starts", "way", "program to READY, s"),
    *("weights (a tokenizer: transformers' reading), s", "all else of the load, s", "of it processor, s"),
    *("processor in all, s", "ids"),
)
_BEGIN, _END = "<!-- written by benchmarks/starts.py -->", "<!-- to here -->"


@dataclass
class Start:
    """One start. Seconds; None: not known. `weights` are for reading them, `rest` for all the other work of a load."""

    name: str
    way: str
    whole: float | None = None
    weights: float | None = None
    rest: float | None = None
    # Of the processor: `rest`.
    work: float | None = None
    # Of the processor: of all processes of the start, to the first answer.
    processor: float | None = None
    ids: tuple[int, ...] = ()
    why_not: str = ""


def many_added_tokens(folder: Path) -> Path:
    """Write the demo model's tokenizer with as many added tokens as Gemma 3 has, plain and special ones in turns."""
    folder.mkdir(parents=True)
    for path in demo_folder().glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(
        [AddedToken(f"<unused{number}>", special=number % 2 == 0, normalized=False) for number in range(ADDED_TOKENS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def tokenizer_start(folder: Path, name: str) -> Start:
    """The work of a tokenizer's start here: copies for its threads, control tokens, the decoding table.

    Seconds of the processor, of which other work on the machine takes none; the parts run on one thread. A service
    begins with little that its collector of garbage looks at, so what this process has by now is left out of its
    rounds: torch, transformers, and the tokenizers before.
    """
    gc.collect()
    gc.freeze()
    began = time.process_time()
    bundle = load(folder)
    loaded = time.process_time()
    vocabulary = Vocabulary(bundle)
    _detokenizers(vocabulary)
    TextTokenizer(vocabulary)
    ended = time.process_time()
    work = round(ended - loaded, 2)
    return Start(name, "tokenizer", None, round(loaded - began, 2), work, work, round(ended - began, 2))


def service_start(model: Path | str, name: str, *flags: str) -> Start:
    """A generation service from its program to READY, and the ids of one request."""
    result = Start(name, " ".join(flags) or "alone")
    process = stack.start("generation", str(model), *flags, defaults=True)
    try:
        stack.wait_serving(process.address, process)
        while (found := re.search(r"^READY .* ([0-9.]+) s$", process.output(), re.MULTILINE)) is None:
            if process.popen.poll() is not None:
                raise RuntimeError(process.output())
        result.whole = float(found[1])
        lines = (json.loads(line) for line in process.output().splitlines() if line.startswith("{"))
        loaded = next(line for line in lines if line.get("event") == "loaded")
        seconds, worked = loaded["seconds"], loaded["processor_seconds"]
        result.weights = round(seconds["weights"], 2)
        result.rest = round(sum(seconds.values()) - seconds["weights"], 2)
        result.work = round(sum(worked.values()) - worked["weights"], 2)
        result.ids = ids_of(process.address)
        result.processor = round(processor_seconds(process.popen.pid), 1)
    except (RuntimeError, TimeoutError) as error:
        last = [line for line in str(error).splitlines() if line.strip()][-1]
        result.why_not = str(json.loads(last)["event"]) if last.startswith("{") else last
    finally:
        if process.popen.poll() is None:
            process.terminate()
    return result


def processor_seconds(pid: int) -> float:
    """Seconds of the processor that a process and its ranks have taken."""
    started = psutil.Process(pid)
    used = [one.cpu_times() for one in (started, *started.children(recursive=True))]
    return float(sum(one.user + one.system for one in used))


def measured(options: argparse.Namespace, folder: Path) -> Iterator[Start]:
    """Every start that was asked for, one after the other."""
    if "tokenizers" in options.only:
        yield tokenizer_start(demo_folder(), "the demo model's")
        yield tokenizer_start(many_added_tokens(folder / "added"), f"made, {ADDED_TOKENS} added tokens")
        for path in options.tokenizers:
            yield tokenizer_start(path, path.name)
    models: list[tuple[str, Path | str]] = []
    if "families" in options.only:
        models += [(family, tiny_checkpoint(folder / family, family)) for family in options.families]
    if "models" in options.only:
        models += [(path.stem, path) for path in options.models]
    for name, model in models:
        flags = () if isinstance(model, Path) and has_tokenizer(model) else ("--no-load-tokenizer",)
        for spread in ((), ("--tensor-parallel", "2")):
            start = service_start(model, name, *flags, *spread)
            start.way = "in two processes" if spread else "alone"
            yield start


def has_tokenizer(model: Path) -> bool:
    """True for a file, which holds its own, and for a folder with one."""
    return model.is_file() or (model / "tokenizer.json").is_file()


def table(starts: list[Start]) -> list[str]:
    """Rows of Markdown."""
    lines = [f"| {' | '.join(_COLUMNS)} |"]
    lines.append("|" + "---|" * len(_COLUMNS))
    first: dict[str, tuple[int, ...]] = {}
    for one in starts:
        told = one.why_not or "–"
        if one.ids and one.way != "tokenizer":
            told = "equal" if first.setdefault(one.name, one.ids) == one.ids else "DIFFER"
        every = (one.whole, one.weights, one.rest, one.work, one.processor)
        times = ("–" if each is None else f"{each:g}" for each in every)
        lines.append(f"| {one.name} | {one.way} | {' | '.join(times)} | {told} |")
    return lines


def write_into(page: Path, lines: list[str]) -> None:
    """Put the table between the marks of a page. Ends the process where the page has none."""
    text = page.read_text(encoding="utf-8")
    before, mark, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not mark or not end:
        refuse(f"{page} has no place for the table: {_BEGIN} … {_END}")
    page.write_text(before + mark + "\n\n" + "\n".join(lines) + "\n\n" + end + after, encoding="utf-8")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), help="default: every native one")
    parser.add_argument("--tokenizers", nargs="*", type=Path, default=[], help="further folders of tokenizers")
    parser.add_argument("--models", nargs="*", type=Path, default=[], help="folders and GGUF files")
    parser.add_argument(
        "--most-seconds", type=float, help="of the processor, for a start's own work; exit status 1 past it"
    )
    parser.add_argument("--write", type=Path, help="page whose table is replaced")


def main(options: argparse.Namespace, report: Report) -> int:
    """Measure; return the exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    starts: list[Start] = []
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="penstock-starts-") as folder:
        for start in measured(options, Path(folder)):
            starts.append(start)
            print(table([start])[-1], flush=True)
            lines = table(starts)
            if options.write is not None:
                # At once: a run that is stopped has the rows so far.
                write_into(options.write, lines)
    cells: list[dict[str, Any]] = [asdict(one) for one in starts]
    slow = [
        f"{one.name}, {one.way}"
        for one in starts
        if options.most_seconds is not None and (one.work or 0.0) > options.most_seconds
    ]
    report.write({"cells": cells, "slow": slow})
    if slow:
        print(f"slower than {options.most_seconds:g} s: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow or any("DIFFER" in line for line in lines) else 0
