"""Load on a server while callers without a token try every known trick on its HTTP/2.

A tokenizer service with a token file. Authorised callers ask for encodings, a probe asks for health, alone and beside
an attacker in turns. The attacker (`factories/wire/attacker.py`) is a process of its own (nice 19) with so many
connections, which play the tricks (`factories/wire/tricks.py`) one after the other and connect again whenever they are
cut off. Told: the service's growth in memory, times of health, answered calls.

    python -m benchmarks attack --seconds 60 --transport asyncio
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks._report import Report

ROOT = Path(__file__).resolve().parents[1]
import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.config import ChannelConfig
from penstock.http2.channel import Http2Channel
from penstock.v1 import tokenizer_pb2, tokenizer_pb2_grpc

from benchmarks._arguments import at_least
from benchmarks._processes import ending_with_us
from benchmarks._report import Table, percentile

MODEL = ROOT / "services" / "penstock" / "assets" / "demo"
TOKEN = "open sesame"
_ENCODE = "/penstock.v1.TokenizerService/Encode"
# Tricks between the first ones of two turns.
_STRIDE = 5


class Load:
    """Authorised callers, and a probe that asks for health."""

    def __init__(self, address: str, callers: int) -> None:
        self.address = address
        self._callers = callers
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.answered = self.failed = 0
        self.errors: Counter[str] = Counter()
        self.health_seconds: list[float] = []
        self.peak = 0.0

    async def run(self, seconds: float) -> None:
        """Call and probe for so long."""
        end = time.monotonic() + seconds
        await asyncio.gather(self._probe(end), *(self._call(end) for _ in range(self._callers)))

    async def _call(self, end: float) -> None:
        async with _channel(self.address, ("authorization", f"Bearer {TOKEN}")) as channel:
            stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            request = tokenizer_pb2.EncodeRequest(texts=["The quick brown fox jumps over the lazy dog. " * 20])
            while time.monotonic() < end:
                try:
                    await stub.Encode(request, timeout=10)
                    self.answered += 1
                except Exception:
                    self.failed += 1

    async def _probe(self, end: float) -> None:
        while time.monotonic() < end:
            # A connection for each, as probes of container runtimes make them.
            begin = time.perf_counter()
            async with _channel(self.address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                try:
                    await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
                except grpc.aio.AioRpcError as error:
                    self.errors[f"{error.code().name}: {error.details()}"] += 1
            self.health_seconds.append(time.perf_counter() - begin)
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _channel(address: str, *metadata: tuple[str, str]) -> AsyncIterator[Any]:
    channel = Http2Channel(address, ChannelConfig(), timeout=10, decorate=lambda given: (*given, *metadata))
    try:
        yield channel
    finally:
        channel.close()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def _server(arguments: argparse.Namespace) -> Any:
    port = _free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".tokens") as tokens:
        tokens.write(TOKEN + "\n")
        tokens.flush()
        flags = ["--port", str(port), "--metrics-port", "-1", "--auth-token-file", tokens.name]
        command = [sys.executable, "-m", "penstock.cli.main", "serve", "tokenizer", str(MODEL), *flags]
        environment = {**os.environ, "PYTHONPATH": str(arguments.tree / "services")}
        command += ["--transport", arguments.transport, "--log-level", "error", *arguments.flag]
        process = subprocess.Popen(ending_with_us(*command), env=environment)
        try:
            yield f"127.0.0.1:{port}", psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                print("the service did not stop within 30 s", file=sys.stderr)


async def _until_ready(address: str) -> None:
    for _ in range(600):
        with contextlib.suppress(Exception):
            async with _channel(address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        await asyncio.sleep(0.1)
    raise SystemExit("the service does not start")


def _memory(process: psutil.Process) -> float:
    """MiB of a process and what it started."""
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True))) / 2**20


async def _watch_memory(process: psutil.Process, load: Load) -> None:
    while True:
        with contextlib.suppress(psutil.Error):
            load.peak = max(load.peak, _memory(process))
        await asyncio.sleep(0.2)


async def _turn(
    arguments: argparse.Namespace, load: Load, process: psutil.Process, *, turn: int, attacked: bool
) -> None:
    seconds = arguments.seconds / arguments.rounds
    attacker = None
    if attacked:
        command = ["-m", "factories.wire.attacker", load.address, "--path", _ENCODE]
        command += ["--connections", str(arguments.connections), "--first", str(_STRIDE * turn)]
        out, paths = asyncio.subprocess.PIPE, (ROOT / "tests", ROOT / "services")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        attacker = await asyncio.create_subprocess_exec(
            *ending_with_us(sys.executable, *command), stdout=out, env=environment
        )
        await attacker.stdout.readline()  # type: ignore[union-attr]
    watching = asyncio.ensure_future(_watch_memory(process, load))
    try:
        await load.run(seconds)
    finally:
        watching.cancel()
        if attacker is not None:
            attacker.kill()
            await attacker.wait()


async def _measure(arguments: argparse.Namespace) -> bool:
    with _server(arguments) as (address, process):
        await _until_ready(address)
        quiet, attacked = Load(address, arguments.callers), Load(address, arguments.callers)
        await quiet.run(min(5.0, arguments.seconds))
        quiet.forget()
        for turn in range(arguments.rounds):
            await _turn(arguments, quiet, process, turn=turn, attacked=False)
            await _turn(arguments, attacked, process, turn=turn, attacked=True)
        table = Table(
            ("", "answered a second", "failed, and of health", "health p50 ms", "health p99 ms", "MiB at most"), None
        )
        figures = []
        for name, load in (("quiet", quiet), ("attacked", attacked)):
            rate = load.answered / arguments.seconds
            p50, p99 = (1000 * percentile(load.health_seconds, share) for share in (0.5, 0.99))
            failed = f"{load.failed} and {load.errors.total()}"
            table.row(name, f"{rate:.0f}", failed, f"{p50:.1f}", f"{p99:.1f}", f"{load.peak:.0f}")
            figures.append((rate, p99, load.peak))
            for what, count in load.errors.most_common(5):
                print(f"health, {name}: {count} of {what}", file=sys.stderr)
        (rate, p99, memory), (rate_then, p99_then, memory_then) = figures
        more = memory_then - memory
        print(f"\n{more:+.0f} MiB; health p99 {p99_then / p99:.2f}x; answered {100 * rate_then / rate:.0f} %")
        whole = not quiet.failed + attacked.failed + quiet.errors.total() + attacked.errors.total()
        return whole and more <= 64 and p99_then <= 2 * p99 and rate_then >= 0.8 * rate


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part, in all its turns")
    parser.add_argument("--rounds", type=at_least(1), default=6, help="turns of each part")
    parser.add_argument("--connections", type=at_least(1), default=10, help="of the attacker")
    parser.add_argument("--callers", type=at_least(1), default=4, help="with a token, each on a connection")
    parser.add_argument("--transport", choices=("asyncio", "grpc"), default="asyncio", help="of the service")
    parser.add_argument("--tree", type=Path, default=ROOT, help="tree whose service is attacked")
    parser.add_argument("--flag", action="append", default=[], help="further flag of the service")


def main(arguments: argparse.Namespace, _report: Report) -> int:
    """Measure, and report it."""
    return int(not asyncio.run(_measure(arguments)))
