"""Command `penstock bench`: load against a running router or generation service."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.cli.bench.config import BenchConfig
from penstock.cli.bench.load import Loop, Run
from penstock.cli.bench.report import summary, tables
from penstock.cli.bench.target import Prompts, Target
from penstock.cli.client.connection import connect
from penstock.cli.console import complain, console
from penstock.cli.flags import Overrides
from penstock.common.config import from_env_and_flags
from penstock.common.errors import StartupError

PROGRESS_SECONDS = 1.0
_SECRETS = ("token_file", "client_cert", "client_key", "tls_ca")


class ProgressLine:
    """Progress on standard error: on a terminal one line that is written over, otherwise a line now and then."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._next = quiet, 0.0
        self._terminal = sys.stderr.isatty()

    def __call__(self, run: Run) -> None:
        now = time.perf_counter()
        if self._quiet or now < self._next:
            return
        self._next = now + (PROGRESS_SECONDS if self._terminal else 10 * PROGRESS_SECONDS)
        failed = sum(bool(sample.failure) for sample in run.samples)
        line = f"{len(run.samples)} ended of {run.sent} sent, {failed} failed, {now - run.started:.0f} s"
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
    _check_writable(config.json)
    result = asyncio.run(_measure(config))
    _write(config, result)
    return 0 if result["succeeded"] else 1


async def _measure(config: BenchConfig) -> dict[str, Any]:
    target, progress = connect(config, lambda client: Target(config, client)), ProgressLine(config.quiet)
    try:
        await target.wait_ready()
        loop = Loop(config, target, Prompts(config, await target.vocab_size()), progress)
        await loop.warm_up()
        run = await loop.measure()
    finally:
        progress.end()
        await target.close()
    return summary(run, config)


def _check_writable(path: str | None) -> None:
    """Check the file before the load rather than after it. Raises StartupError."""
    if path in (None, "-"):
        return
    try:
        Path(str(path)).expanduser().touch()
    except OSError as error:
        raise StartupError(f"--json {path}: {error.strerror}", flag="--json") from error


def _write(config: BenchConfig, result: dict[str, Any]) -> None:
    if config.json != "-":
        console().print(*tables(result))
    if config.json is None:
        return
    settings = {name: value for name, value in asdict(config).items() if name not in _SECRETS}
    text = json.dumps({"benchmark": "load", "version": __version__, "settings": settings, **result}, indent=2) + "\n"
    if config.json == "-":
        sys.stdout.write(text)
    else:
        Path(config.json).expanduser().write_text(text)
        complain(f"figures written to {config.json}")
