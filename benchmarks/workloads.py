"""W1 to W6 on Penstock and other engines, in turns, with the share of the machine's limit in every row.

    python -m benchmarks workloads --engines penstock,transformers --workloads W1,W2 --rounds 3 --json FILE
    python -m benchmarks workloads --engines penstock,penstock-grpc,transformers,openvino,llamacpp,vllm --rounds 5 \\
        --json bf16.json --plot bf16.png
    python -m benchmarks workloads --engines penstock,openvino,llamacpp,vllm --dtype int8 --model llama-3.2-1b
    python -m benchmarks workloads --engines penstock:int4,penstock:q4_k_m,llamacpp:q4_k_m

Every engine is a process that loads once; then for every round and workload each engine has its turn, the others
asleep, so that a machine's drift in speed is the same for all. A first round warms up and does not count. Prompts are
random ids, others in every round and the same for all engines; outputs are greedy and of the length that was asked for.
The machine's bandwidth and peak are measured before and after. `python -m benchmarks report FILE` shows its tables.
An engine may be there several times, with a number format of its own behind a colon. On a real model (real_models.py)
each engine first reads `--error-tokens` of English prose; its error beside transformers in float32 stands beside its
speeds, and the report compares speeds of like error only.
With `--adapters 8` every request is of one of eight random LoRA adapters. The limit's share counts the model alone.
Engines other than Penstock and transformers are used when they are installed (`make peers`; docs/guide/benchmarks.md).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
from benchmarks import report as reports
from benchmarks._arguments import at_least, names, numbers, parts, refuse
from benchmarks._processes import ending_with_us
from benchmarks._report import Report, environment
from benchmarks._text_error import TextError, exact_scores, prose_documents
from benchmarks.adapters import adapter_folders
from benchmarks.cells import WORKLOADS, Workload, figures, medians, tokens_needed
from benchmarks.checkpoints import CACHE, SHAPES
from benchmarks.engines import ENGINES, dtype_of, engine_of
from benchmarks.engines.base import Settings, TextScores
from benchmarks.engines.process import EngineFailed, EngineProcess
from benchmarks.real_models import MODELS, folder_of, gguf_file
from benchmarks.roofline import BYTES_PER_WEIGHT, Machine, Model, ideal

KV_SLACK, CONTEXT, SETTLE_SECONDS = 1024, 4096, 0.3
ERROR_TOKENS = 2048


def say(line: str) -> None:
    """Progress goes to stderr."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


class Bench:
    """One run: loaded engines, and what came of every turn."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.workloads = [WORKLOADS[name] for name in options.workloads]
        folder = folder_of(options.model, options.cache)
        self.model = Model.read(folder)
        published = str(gguf_file(options.model, options.cache)) if options.model in MODELS else ""
        adapters = tuple(map(str, adapter_folders(folder, options.adapters, options.adapter_ranks, options.cache)))
        self.settings = {
            label: Settings(
                str(folder),
                dtype_of(label, options.dtype),
                options.threads,
                tokens_needed(self.workloads) + KV_SLACK,
                CONTEXT,
                str(options.cache),
                options.option.get(engine_of(label), {}),
                adapters,
                published,
            )
            for label in options.engines
        }
        tokens = options.error_tokens if options.error_tokens is not None else ERROR_TOKENS * bool(published)
        self.documents = prose_documents(folder, tokens) if tokens else []
        self.exact = exact_scores(next(iter(self.settings.values())), self.documents) if tokens else TextScores()
        self.engines: dict[str, EngineProcess] = {}
        self.failures: dict[str, str] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.rounds: dict[tuple[str, str], list[dict[str, float]]] = {}
        self.probes: list[dict[str, Any]] = []

    def measure(self) -> dict[str, Any]:
        """Everything, as one JSON object; also written after every round."""
        load_average = os.getloadavg()[0]
        self._probe()
        try:
            for name in self.options.engines:
                self._load(name)
            for number in range(-self.options.warmup, self.options.rounds):
                for workload in self.workloads:
                    self._turns(workload, number)
                self._write(load_average)
            self._close()
        finally:
            # Only where something was raised, a signal's exit too: nothing is left of a run that was stopped.
            for engine in self.engines.values():
                engine.stop()
                engine.log.unlink(missing_ok=True)
        self._probe()
        return self._write(load_average)

    def _close(self) -> None:
        while self.engines:
            name, engine = self.engines.popitem()
            try:
                engine.close()
            except EngineFailed as error:
                say(f"{name}: {error}")

    def _probe(self) -> None:
        if self.options.probe_seconds:
            say("measuring the machine's bandwidth and peak")
            command = ending_with_us(sys.executable, str(ROOT / "benchmarks" / "__main__.py"), "roofline")
            command += ["--threads", str(self.options.threads), "--seconds", str(self.options.probe_seconds)]
            self.probes.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))

    def _load(self, name: str) -> None:
        kind = engine_of(name)
        left_out = [one.name for one in self.workloads if skipped(kind, one.name, self.options.include)]
        if left_out:
            flags = " ".join(f"--include {kind}:{one}" for one in left_out)
            say(f"{name}: leaves out {', '.join(left_out)}; {flags} runs what is left out")
        if len(left_out) == len(self.workloads):
            self.failures[name] = f"leaves out {', '.join(left_out)} without --include"
            return
        say(f"loading {name}")
        try:
            engine = EngineProcess(
                kind, ENGINES[kind], self.options.cache, self.options.threads, passive=self.options.passive
            )
        except EngineFailed as error:
            self._failed(name, error)
            return
        self.engines[name] = engine
        try:
            self.facts[name] = engine.load(self.settings[name])
        except EngineFailed as error:
            self._failed(name, error)
            return
        if self.documents:
            self._read(name, engine)

    def _read(self, name: str, engine: EngineProcess) -> None:
        try:
            error = TextError.between(engine.score(self.documents), self.exact)
        except EngineFailed as failure:
            # Its speeds are measured all the same, and compared with nothing.
            say(f"{name}: no error: {failure}")
            return
        say(f"{name}: error {error.mean:.4f}")
        self.facts[name] |= error.facts()

    def _turns(self, workload: Workload, number: int) -> None:
        # A seed for every round: what an earlier one left in a prefix cache is of no use.
        prompts, outputs = workload.requests(self.model.vocab_size, number)
        turns = list(self.engines)
        start = number % max(len(turns), 1)
        for name in turns[start:] + turns[:start]:
            if skipped(engine_of(name), workload.name, self.options.include):
                continue
            # Threads of the turn before may spin a little longer.
            time.sleep(SETTLE_SECONDS)
            try:
                answer = self.engines[name].run(prompts, outputs)
            except EngineFailed as error:
                self._failed(f"{name}", error)
                continue
            own = {name: float(answer[name]) for name in ("peak_rss_bytes", "processor_s")}
            found = {**figures(workload, answer["times"]), **own}
            shown = f"{found['output_tok_s']:.1f} tok/s, first {found['ttft_s'] * 1e3:.0f} ms"
            say(f"{'warm-up' if number < 0 else f'round {number + 1}'} {workload.name} {name}: {shown}")
            if number >= 0:
                self.rounds.setdefault((workload.name, name), []).append(found)

    def _failed(self, name: str, error: EngineFailed) -> None:
        say(f"{name}: {error}")
        self.failures[name] = "not installed" if error.missing else str(error)
        engine = self.engines.pop(name, None)
        if engine is not None:
            engine.stop()

    def _machine(self) -> Machine:
        peaks = {name: max(one["peaks"][name] for one in self.probes) for name in self.probes[0]["peaks"]}
        return Machine(max(one["bandwidth"] for one in self.probes), peaks)

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for (workload, engine), found in self.rounds.items():
            row: dict[str, Any] = {"workload": workload, "engine": engine, "median": medians(found), "rounds": found}
            dtype = dtype_of(engine, self.options.dtype)
            if self.probes and dtype in BYTES_PER_WEIGHT:
                limit = ideal(WORKLOADS[workload], self.model, self._machine(), dtype)
                row["roofline"] = {"prefill_s": limit.prefill, "decode_s": limit.decode}
                row["roofline_share"] = limit.shares(row["median"])
            rows.append(row)
        return rows

    def _write(self, load_average: float) -> dict[str, Any]:
        options = self.options
        settings = {
            name: getattr(options, name)
            for name in ("model", "dtype", "threads", "rounds", "warmup", "passive", "adapters", "adapter_ranks")
        } | {"error_tokens": sum(len(document) - 1 for document in self.documents), "parameters": self.model.parameters}
        result = {
            "benchmark": "workloads",
            "environment": {**environment(), "load_average": load_average},
            "settings": {**settings, "options": options.option},
            "machine": self.probes,
            "engines": self.facts,
            "failures": self.failures,
            "rows": self._rows(),
        }
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
        return result


def _participants(text: str) -> list[str]:
    """Type of a flag for a list of engines, each with a format of its own or without one."""
    found = parts(text)
    names(ENGINES, "engine")(",".join(map(engine_of, found)))
    return found


def skipped(engine: str, workload: str, included: list[str]) -> bool:
    """True when the engine leaves the workload out: --include did not ask for its turn."""
    return workload in ENGINES[engine].skips and f"{engine}:{workload}" not in included


def _turn(text: str) -> str:
    engine, _, workload = text.partition(":")
    if engine not in ENGINES or workload not in WORKLOADS:
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE:WORKLOAD, such as transformers:W5")
    return text


def _engine_options(given: list[str]) -> dict[str, dict[str, str]]:
    """{engine: {key: value}} of ENGINE.KEY=VALUE. Ends the process for another form."""
    options: dict[str, dict[str, str]] = {}
    for text in given:
        name, _, value = text.partition("=")
        engine, _, key = name.partition(".")
        if engine not in ENGINES or not key or "=" not in text:
            refuse(f"--option {text}: must be ENGINE.KEY=VALUE, ENGINE one of {', '.join(ENGINES)}")
        options.setdefault(engine, {})[key.replace("-", "_")] = value
    return options


def add_flags(made: argparse.ArgumentParser) -> None:
    """Add the flags. The file of --json is written after every round."""
    made.add_argument(
        "--engines", type=_participants, metavar="ENGINE[:FORMAT],…", default=["penstock", "transformers"]
    )
    made.add_argument("--workloads", type=names(WORKLOADS, "workload"), default=list(WORKLOADS))
    made.add_argument("--rounds", type=at_least(1), default=3)
    made.add_argument("--warmup", type=at_least(0), default=1, help="rounds before those that count")
    known = ", ".join((*MODELS, *SHAPES))
    made.add_argument("--model", default=next(iter(MODELS)), help=f"{known} or a folder (default: %(default)s)")
    made.add_argument(
        "--error-tokens",
        type=at_least(0),
        help=f"of prose that each engine reads for its error (default: {ERROR_TOKENS} on a real model, else 0)",
    )
    made.add_argument("--dtype", choices=list(BYTES_PER_WEIGHT), default="bf16")
    made.add_argument("--threads", type=at_least(1), default=2, help="of every engine")
    made.add_argument("--adapters", type=at_least(0), default=0, help="LoRA adapters; requests take them in turn")
    made.add_argument("--adapter-ranks", type=numbers, default="8,16", help="of the adapters in turn, with commas")
    made.add_argument("--option", action="append", default=[], metavar="ENGINE.KEY=VALUE", help="an engine's own")
    made.add_argument(
        "--include",
        type=_turn,
        action="append",
        default=[],
        metavar="ENGINE:WORKLOAD",
        help="a turn that is left out otherwise",
    )
    made.add_argument(
        "--passive", action="store_true", help="waiting threads of every engine sleep at once: for a busy machine"
    )
    made.add_argument("--probe-seconds", type=float, default=3.0, help="for each figure of the machine; 0: no roofline")
    made.add_argument("--cache", type=Path, default=CACHE, help="of checkpoints and other engines' environments")
    made.add_argument("--plot", type=Path, help="draw them there (PNG or SVG; needs matplotlib)")


def main(options: argparse.Namespace, _report: Report) -> None:
    """Measure; tables go to stdout."""
    options.option = _engine_options(options.option)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        refuse("--plot needs matplotlib; report.py --plot draws a --json file later, with any Python that has it")
    turns = [(engine_of(label), workload) for label in options.engines for workload in options.workloads]
    if all(skipped(*turn, options.include) for turn in turns):
        refuse(f"--workloads: nothing to run without --include {':'.join(turns[0])}")
    result = Bench(options).measure()
    print(reports.markdown(result))
    if not result["rows"]:
        sys.exit("no engine finished a round; why is above")
    if options.plot is not None:
        reports.plot(result, options.plot)
