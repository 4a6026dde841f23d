"""Processor time and latency of calls that a router refuses at once, over each transport.

A real router and tokenizer, and a backend whose queue is full: every Generate ends as RESOURCE_EXHAUSTED, before any
work for it. A closed loop of a few callers tells what a refusal costs the router's process, an open loop with `--rate`
calls a second how long it takes.

    python -m benchmarks refused_calls [--transport asyncio grpc] [--tree DIR] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
from factories.servers import stack
from factories.servers.emitting_backend import EmittingBackend

from benchmarks._arguments import at_least
from benchmarks._overload_client import Client, Flow
from benchmarks._report import Report, percentile

ROOT = Path(__file__).resolve().parents[1]
_COLUMNS = ("transport", "round", "calls/s", "router's CPU µs a call", "p50 ms", "p99 ms", "at rate: p50 ms", "p99 ms")
_WORDS, _TOKENS = 30, 32
_SECONDS_TO_DEADLINE = 10.0


@contextlib.asynccontextmanager
async def _router(transport: str, tree: Path) -> AsyncIterator[stack.Process]:
    """Run a router that refuses all."""
    async with EmittingBackend(max_queued=1, extra_load=1) as backend:
        environment = {"PYTHONPATH": str(tree / "services")}
        tokenizer = stack.start("tokenizer", environment=environment)
        processes = [tokenizer]
        try:
            await asyncio.to_thread(tokenizer.wait_ready)
            flags = ("--transport", transport, "--tokenizer", tokenizer.address, "--backend", backend.address)
            processes.append(stack.start("router", *flags, environment=environment))
            await asyncio.to_thread(processes[-1].wait_ready)
            yield processes[-1]
        finally:
            for process in processes:
                process.kill()
                process.log.unlink(missing_ok=True)


def _refusals(flow: Flow) -> list[float]:
    """Return the seconds of all refusals; a call that ended by its deadline took as long as that. Exits where one was
    answered."""
    ended = [*flow.refusals, *[_SECONDS_TO_DEADLINE] * (flow.late + flow.lost.total())]
    if flow.good or not flow.refusals:
        sys.exit(f"calls were not refused: {len(flow.good)} answered, {flow.late} late, {dict(flow.lost)}")
    return ended


async def _round(client: Client, process: psutil.Process, arguments: argparse.Namespace) -> dict[str, float]:
    before, begin = process.cpu_times(), time.perf_counter()
    closed = _refusals(await client.closed_loop(arguments.callers, arguments.seconds))
    seconds, after = time.perf_counter() - begin, process.cpu_times()
    used = after.user + after.system - before.user - before.system
    opened = _refusals(await client.open_loop(arguments.rate, arguments.seconds, _SECONDS_TO_DEADLINE))
    return {
        "calls_per_second": len(closed) / seconds,
        "cpu_us": 1e6 * used / len(closed),
        "p50_ms": 1e3 * percentile(closed, 0.5),
        "p99_ms": 1e3 * percentile(closed, 0.99),
        "open_p50_ms": 1e3 * percentile(opened, 0.5),
        "open_p99_ms": 1e3 * percentile(opened, 0.99),
    }


async def _measure(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    table, rows = report.table(_COLUMNS), []
    for transport in arguments.transport:
        async with _router(transport, arguments.tree) as router:
            client, process = Client(_WORDS, _TOKENS, seed=1), psutil.Process(router.popen.pid)
            await client.connect(router.address, arguments.connections)
            # A process is slow at first.
            await client.closed_loop(arguments.callers, arguments.seconds)
            for number in range(arguments.rounds):
                row = await _round(client, process, arguments)
                rows.append({"transport": transport, "round": number, **row})
                table.row(transport, number, *(f"{value:.1f}" for value in row.values()))
            client.close()
    return {"rows": rows}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--transport", nargs="+", choices=("asyncio", "grpc"), default=["asyncio", "grpc"])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each loop of a round")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--callers", type=at_least(1), default=8, help="of the closed loop")
    parser.add_argument("--connections", type=at_least(1), default=4)
    parser.add_argument("--rate", type=float, default=300.0, help="calls a second of the open loop")
    parser.add_argument("--tree", type=Path, default=ROOT, help="source tree whose router refuses")


def main(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    report.save(asyncio.run(_measure(arguments, report)))
