"""Command `penstock bench`: load against a running router or generation service."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from penstock import __version__
from penstock.cli.bench.config import BenchConfig
from penstock.cli.bench.dataset import DatasetPrompts
from penstock.cli.bench.load_loop import Loop, PromptSource, Run
from penstock.cli.bench.plot import check_plot, draw
from penstock.cli.bench.report import greatest_rate_served, summary, sweep_tables, tables
from penstock.cli.bench.target import BenchTarget, Prompts
from penstock.cli.client.connection import connect
from penstock.cli.console import complain, console
from penstock.cli.flags import ENV_NOTE, Overrides, command
from penstock.common.config import from_env_and_flags
from penstock.common.errors import StartupError
from penstock.common.options import options_of

EPILOG = f"""A closed loop keeps --concurrency requests open; an open loop sends --rate
a second, whether the server keeps up or not, and counts from when each was due.
Exit code 1: no request succeeded. docs/guide/benchmarks.md explains the figures.

{ENV_NOTE}

Examples:

  penstock bench --concurrency 16 --requests 200 --prompt-tokens 128 --output-tokens 64

  penstock bench --rate 4 --duration 60s --prompt-tokens 32-512 --output-tokens 16-128 --json load.json

  penstock bench --rate 8 --duration 30s --slo-ttft 500ms --slo-tpot 50ms

  penstock bench --rates 1,2,4,8 --duration 30s --slo-ttft 500ms --dataset prompts.jsonl --plot curves.svg

  penstock bench --direct --address 127.0.0.1:50052 --common-prefix-tokens 512 --prompt-tokens 544"""

PROGRESS_SECONDS = 1.0
_SECRETS = ("token_file", "client_cert", "client_key", "tls_ca")


class ProgressLine:
    """Progress on standard error: one line that is overwritten on a terminal, otherwise an occasional line."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._next = quiet, 0.0
        self.label = ""
        self._terminal = sys.stderr.isatty()

    def __call__(self, run: Run) -> None:
        now = time.perf_counter()
        if self._quiet or now < self._next:
            return
        self._next = now + (PROGRESS_SECONDS if self._terminal else 10 * PROGRESS_SECONDS)
        failed = sum(bool(sample.failure) for sample in run.samples)
        line = f"{self.label}{len(run.samples)} ended of {run.sent} sent, {failed} failed, {now - run.started:.0f} s"
        sys.stderr.write(f"\r\x1b[K{line}" if self._terminal else f"penstock: {line}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Clear the line."""
        if self._terminal and not self._quiet:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def run_bench(given: Overrides) -> int:
    """Send the load and show the figures; return 1 when no request succeeded. Raises StartupError, PenstockError."""
    config = from_env_and_flags(BenchConfig, given)
    _check_writable("--json", config.json)
    _check_writable("--plot", config.plot)
    if config.plot is not None:
        check_plot(config.plot)
    result = asyncio.run(_measure(config))
    _write(config, result)
    return 0 if result["succeeded"] else 1


async def _measure(config: BenchConfig) -> dict[str, Any]:
    prompts: PromptSource | None = None if config.dataset is None else DatasetPrompts(config, config.dataset)
    target, progress = connect(config, lambda client: BenchTarget(config, client)), ProgressLine(config.quiet)
    runs: list[dict[str, Any]] = []
    try:
        await target.wait_ready()
        # Asked for in any case: its errors explain a wrong address or --model well.
        vocab_size = await target.vocab_size()
        prompts = prompts or Prompts(config, vocab_size)
        for load in config.loads:
            if config.rates is not None:
                progress.label = f"{load.rate:g} requests/s: "
            target.forget_prefixes()
            loop = Loop(load, target, prompts, progress)
            await loop.warm_up()
            runs.append(summary(await loop.measure(), load))
    finally:
        progress.end()
        await target.close()
    if config.rates is None:
        return runs[0]
    return {
        "requests": sum(run["requests"] for run in runs),
        "succeeded": sum(run["succeeded"] for run in runs),
        "greatest_rate_served": greatest_rate_served(runs, config.slo_share),
        "runs": runs,
    }


def _check_writable(flag: str, path: str | None) -> None:
    """Check a file before the load rather than after it. Raises StartupError."""
    if path is None or (path == "-" and flag == "--json"):
        return
    try:
        Path(path).expanduser().touch()
    except OSError as error:
        raise StartupError(f"{flag} {path}: {error.strerror}", flag=flag) from error


def _write(config: BenchConfig, result: dict[str, Any]) -> None:
    if config.json != "-":
        console().print(*(tables(result) if config.rates is None else sweep_tables(result, config.slo_share)))
    if config.plot is not None:
        draw(result, config)
        complain(f"curves written to {config.plot}")
    if config.json is None:
        return
    settings = {name: value for name, value in asdict(config).items() if name not in _SECRETS}
    text = json.dumps({"benchmark": "load", "version": __version__, "settings": settings, **result}, indent=2) + "\n"
    if config.json == "-":
        sys.stdout.write(text)
    else:
        Path(config.json).expanduser().write_text(text)
        complain(f"figures written to {config.json}")


def _bench(given: Overrides) -> None:
    raise typer.Exit(run_bench(given))


commands = typer.Typer(add_completion=False)
commands.command("bench", epilog=EPILOG)(command(options_of(BenchConfig), _bench))
