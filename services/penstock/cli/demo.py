"""Command `penstock demo`, which `make demo` runs: the whole stack, one answer, its timings."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import typer
from rich.table import Table

from penstock.cli.client.answer import allow_any_text, stage_timings, stats_line, stream_answer
from penstock.cli.client.chat import HELP, ChatSession
from penstock.cli.client.connection import ConnectionConfig, open_client
from penstock.cli.client.sampling import SamplingConfig
from penstock.cli.console import console, say
from penstock.cli.flags import ENV_NOTE, Overrides, command
from penstock.cli.serve.reports import ERROR, READY, Report
from penstock.common.checkpoint import check_model
from penstock.common.config import from_env_and_flags
from penstock.common.environment import child_environment
from penstock.common.errors import StartupError
from penstock.common.named_models import MODEL_HELP
from penstock.common.options import option, options_of

EPILOG = f"""{ENV_NOTE}

Examples:

  penstock demo

  penstock demo --model smollm2"""
# The embedded model knows about Penstock and hardly anything else; other models have never heard of it.
QUESTION, QUESTION_FOR_OTHERS = "What is Penstock?", "Why is the sky blue?"
STOP_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Configuration of `penstock demo`."""

    model: str | None = option(None, MODEL_HELP, group="Demo")


def run_demo(model: str | None = None) -> int:
    """Start, answer, show, stop; return the exit code. Raises StartupError when the stack cannot start."""
    allow_any_text()
    check_model(model)
    say(f"Starting tokenizer, generation, router and gateway on {model or 'the embedded model'} …")
    question = QUESTION if model is None else QUESTION_FOR_OTHERS
    with running_stack(model) as ready:
        connection = ConnectionConfig(address=ready.addresses["router"])
        with open_client(connection) as client:
            say(f"\n› {question}")
            completion = stream_answer(client.stream([{"role": "user", "content": question}], max_new_tokens=200))
            if completion is None:
                return 130
            console().print(stats_line(completion), style="dim", markup=False)
            console().print(_timings(stage_timings(completion.timings)), _addresses(ready))
            if sys.stdin.isatty() and sys.stdout.isatty():
                import readline  # noqa: F401  # line editing and history for input()

                say(f"Your turn: {HELP}")
                ChatSession(client, SamplingConfig(stats=True)).run(lambda: input("› "))
        say("Stopping …")
    return 0


def _timings(stages: list[tuple[str, str]]) -> Table:
    table = Table("stage", "time", title="Where the time went", title_justify="left")
    for stage, shown in stages:
        table.add_row(stage, shown)
    return table


def _addresses(ready: Report) -> Table:
    table = Table("process", "address", "metrics", title="Addresses", title_justify="left")
    for name, address in ready.addresses.items():
        table.add_row(name, address, f"http://{ready.metrics[name]}/metrics")
    return table


@contextlib.contextmanager
def running_stack(model: str | None = None) -> Iterator[Report]:
    """Run `penstock serve` on free ports as a child, and yield its READY report; drain and end it afterwards."""
    read_end, write_end = os.pipe()
    arguments = [
        sys.executable,
        "-P",
        "-m",
        "penstock.cli.main",
        "serve",
        *([] if model is None else ["--model", model]),
    ]
    arguments += ["--port", "0", "--metrics-port", "0", "--http-port", "0"]
    process = subprocess.Popen(
        [*arguments, "--report-fd", str(write_end), "--parent-pid", str(os.getpid())],
        pass_fds=(write_end,),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=child_environment(),
    )
    os.close(write_end)
    try:
        with os.fdopen(read_end, "rb") as reports:
            yield _wait_ready(iter(reports))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(STOP_SECONDS)


def _wait_ready(lines: Iterator[bytes]) -> Report:
    for line in lines:
        report = Report.decode(line)
        if report.event == READY:
            return report
        if report.event == ERROR:
            raise StartupError(report.message, flag=report.flag)
    raise StartupError("the stack ended before it was ready; its last lines are above")


def _demo(given: Overrides) -> None:
    raise typer.Exit(run_demo(from_env_and_flags(DemoConfig, given).model))


commands = typer.Typer(add_completion=False)
commands.command("demo", epilog=EPILOG)(command(options_of(DemoConfig), _demo))
