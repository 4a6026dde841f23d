"""Command `penstock demo`, which `make demo` runs: the whole stack, one answer, its timings."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import typer
from rich.table import Table

from penstock.cli.client.answer import allow_any_text, stage_timings, stats_line, stream_answer
from penstock.cli.client.chat import HELP, ChatSession
from penstock.cli.client.connection import ConnectionConfig, open_client
from penstock.cli.client.sampling import SamplingConfig
from penstock.cli.console import console, say
from penstock.cli.serve.reports import ERROR, READY, Report
from penstock.common.environment import child_environment
from penstock.common.errors import StartupError

QUESTION = "What is Penstock?"
STOP_SECONDS = 60.0


def run_demo() -> int:
    """Start, answer, show, stop; return the exit code. Raises StartupError when the stack cannot start."""
    allow_any_text()
    say("Starting tokenizer, generation, router and gateway on the embedded model …")
    with running_stack() as ready:
        connection = ConnectionConfig(address=ready.addresses["router"])
        with open_client(connection) as client:
            say(f"\n› {QUESTION}")
            completion = stream_answer(client.stream([{"role": "user", "content": QUESTION}], max_new_tokens=200))
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
def running_stack() -> Iterator[Report]:
    """Run `penstock serve` on free ports as a child, and yield its READY report; drain and end it afterwards."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-P", "-m", "penstock.cli.main", "serve"]
    command += ["--port", "0", "--metrics-port", "0", "--http-port", "0"]
    process = subprocess.Popen(
        [*command, "--report-fd", str(write_end), "--parent-pid", str(os.getpid())],
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


def _demo() -> None:
    raise typer.Exit(run_demo())


commands = typer.Typer(add_completion=False)
commands.command("demo")(_demo)
