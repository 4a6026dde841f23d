"""Cost of a whole router before few and many backends that emit: processor a request and a token, memory, its start.

    python -m benchmarks router_load [--backends 1,10,100,1000] [--requests 160] [--tokens 65] [--plot FILE]

The router and the tokenizer are processes as in production. Backends have no model (the tests' EmittingBackend). Each
is a server on a port of its own, and two processes hold all of them. They report their load, and each has one of four
adapters. A client sends requests of 512 ids, `--concurrency` at a time; the first half of a prompt is one of 50
beginnings. A round is three loads: answers of one token, answers of `--tokens`, and answers of one token with an
adapter. The router's processor time is that of its threads by the scheduler, without its work at rest; medians of the
rounds are told.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import time
import urllib.request
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from factories.servers import stack
from factories.servers.emitting_backend import EmittingBackend, count_up
from penstock.serving.descriptors import raise_descriptor_limit
from penstock.v1 import text_pb2, text_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

from benchmarks._arguments import at_least, numbers
from benchmarks._panels import Panels, check_plot
from benchmarks._report import Report
from benchmarks._wire_stack import memory_mb

EMITTERS, ADAPTERS, BEGINNINGS = 2, 4, 50
START_SECONDS, LOOK_SECONDS = 300, 0.5
HEADER = (
    "backends",
    "up_s",
    "up_cpu_s",
    "rest_cpu_share",
    "memory_mb",
    "request_cpu_us",
    "adapter_request_cpu_us",
    "token_cpu_us",
    "first_token_ms",
)


def emit(first: int, count: int, tokens: int, fingerprint: str, told: Any, stop: Any) -> None:
    """Run backends number `first` and on until `stop`; tell their addresses."""
    raise_descriptor_limit()

    async def run() -> None:
        backends = [
            await EmittingBackend(
                script=count_up(tokens),
                fingerprint=fingerprint,
                max_queued=1024,
                adapters={adapter_of(number): "folder"},
            ).start()
            for number in range(first, first + count)
        ]
        told.put([one.address for one in backends])
        await asyncio.to_thread(stop.wait)

    asyncio.run(run())


def adapter_of(number: int) -> str:
    """Return the name of a backend's adapter, or of a request's."""
    return f"adapter-{number % ADAPTERS}"


class Client:
    """Requests over one connection."""

    def __init__(self, address: str, concurrency: int) -> None:
        self._address, self._concurrency = address, concurrency
        self._draw = random.Random(7)
        self._first: list[float] = []

    async def ask(self, count: int, tokens: int, adapters: int = 0) -> float:
        """Send requests, each with one of the first `adapters` if there are some; return the median time to a token."""
        self._first.clear()
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub: Any = text_pb2_grpc.TextServiceStub(channel)
            left = iter(range(count))

            async def worker() -> None:
                for number in left:
                    await self._one(stub, tokens, adapter_of(number % adapters) if adapters else "")

            await asyncio.gather(*(worker() for _ in range(self._concurrency)))
        return median(self._first)

    async def _one(self, stub: Any, tokens: int, adapter: str) -> None:
        head = random.Random(self._draw.randrange(BEGINNINGS))
        request = text_pb2.GenerateTextRequest(adapter=adapter)
        for draw in (head, self._draw):
            request.token_ids.ids.extend(draw.randrange(300, 4000) for _ in range(256))
        request.config.max_new_tokens = tokens
        begun, is_first = time.monotonic(), True
        async for event in stub.Generate(request, wait_for_ready=True):
            if is_first and event.HasField("delta"):
                self._first.append(time.monotonic() - begun)
                is_first = False


def backends_up(metrics_address: str) -> int:
    """Return the number of backends that are up, by the router's metrics."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith("penstock_router_backend_up{"))


def wait_until_up(router: stack.Process, count: int) -> None:
    """Return once all backends are up. Raises TimeoutError."""
    router.wait_ready()
    deadline = time.monotonic() + START_SECONDS
    while (up := backends_up(router.metrics_address)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{up} of {count} backends are up after {START_SECONDS} s:\n{router.output()[-2000:]}")
        time.sleep(LOOK_SECONDS)


def run_seconds(pid: int) -> float:
    """Return the time that a process's threads have run, by the scheduler: a request is shorter than a tick."""
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


class Measured:
    """Processor time of a process, without what it takes at rest."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.rest = 0.0

    def note_rest(self, seconds: float) -> None:
        """Measure it at rest."""
        self.rest = self.during(lambda: time.sleep(seconds)) / seconds

    def during(self, work: Any) -> float:
        """Return what it takes while `work` is done."""
        before, begun = run_seconds(self._pid), time.monotonic()
        work()
        return run_seconds(self._pid) - before - self.rest * (time.monotonic() - begun)


def measure(count: int, options: argparse.Namespace, tokenizer: str, fingerprint: str) -> dict[str, Any]:
    """Start backends and a router, and measure it."""
    spawn = multiprocessing.get_context("spawn")
    told, stop = spawn.Queue(), spawn.Event()
    ends = [count * place // EMITTERS for place in range(EMITTERS + 1)]
    shares = [(first, end - first) for first, end in pairwise(ends) if end > first]
    with ExitStack() as closing:
        for first, share in shares:
            emitter = spawn.Process(
                target=emit, args=(first, share, options.tokens, fingerprint, told, stop), daemon=True
            )
            emitter.start()
            closing.callback(emitter.kill)
        addresses = [address for _ in shares for address in told.get(timeout=START_SECONDS)]
        begun = time.monotonic()
        router = stack.start("router", "--tokenizer", tokenizer, "--backend", ",".join(addresses))
        closing.callback(router.kill)
        wait_until_up(router, count)
        up, measured = time.monotonic() - begun, Measured(router.popen.pid)
        up_cpu = run_seconds(router.popen.pid)
        client = Client(router.address, options.concurrency)
        # The first requests load what is needed.
        asyncio.run(client.ask(options.requests // 2, options.tokens, min(count, ADAPTERS)))
        measured.note_rest(options.rest_seconds)
        first_seconds: list[float] = []

        def spent(tokens: int, adapters: int = 0) -> float:
            """Return µs a request."""
            took = measured.during(
                lambda: first_seconds.append(asyncio.run(client.ask(options.requests, tokens, adapters)))
            )
            return 1e6 * took / float(options.requests)

        rounds = [(spent(1), spent(options.tokens), spent(1, min(count, ADAPTERS))) for _ in range(options.rounds)]
        return {
            "backends": count,
            "up_s": round(up, 1),
            "up_cpu_s": round(up_cpu, 2),
            "rest_cpu_share": round(measured.rest, 4),
            "memory_mb": round(memory_mb(router.popen.pid), 1),
            "request_cpu_us": round(median(short for short, _, _ in rounds)),
            "adapter_request_cpu_us": round(median(named for _, _, named in rounds)),
            "token_cpu_us": round(median((long - short) / (options.tokens - 1) for short, long, _ in rounds), 1),
            "first_token_ms": round(1e3 * median(first_seconds), 1),
        }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the four panels over the number of backends: a request, a token, memory, the start."""
    panels = Panels("router_load", 4)
    request, token, memory, start = panels.axes
    counts = [row["backends"] for row in rows]
    lines = {
        request: (("request_cpu_us", "one token"), ("adapter_request_cpu_us", "one token, with an adapter")),
        token: (("token_cpu_us", ""),),
        memory: (("memory_mb", ""),),
        start: (("up_cpu_s", "processor time of the router"), ("up_s", "by the clock, with the backends' own work")),
    }
    for axes, names in lines.items():
        for name, label in names:
            axes.plot(counts, [row[name] for row in rows], "o-", label=label)
        axes.set(xscale="log", xlabel="backends, one router")
        axes.set_ylim(bottom=0)
    request.set(title="a request", ylabel="µs of processor time")
    token.set(title="a token", ylabel="µs of processor time")
    memory.set(title="memory of the router", ylabel="MB")
    start.set(title="until all are up", ylabel="s")
    request.legend(fontsize=7, loc="lower left")
    start.legend(fontsize=7, loc="upper left")
    panels.save(path)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--backends", type=numbers, default=[1, 10, 100, 1000])
    parser.add_argument("--requests", type=at_least(16), default=160, help="of each load of a round")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--tokens", type=at_least(2), default=65, help="of a long answer")
    parser.add_argument("--concurrency", type=at_least(1), default=16, help="requests at a time")
    parser.add_argument("--rest-seconds", type=float, default=5.0)
    parser.add_argument("--plot", type=Path, help="file for the picture, .svg or .png")


def main(options: argparse.Namespace, report: Report) -> None:
    """Run it."""
    check_plot(options.plot)
    with ExitStack() as closing:
        tokenizer = stack.start("tokenizer")
        closing.callback(tokenizer.kill)
        tokenizer.wait_ready()
        with grpc.insecure_channel(tokenizer.address) as channel:
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            fingerprint = stub.GetTokenizer(tokenizer_pb2.GetTokenizerRequest()).tokenizer_fingerprint
        table, rows = report.table(HEADER), []
        for count in options.backends:
            rows.append(measure(count, options, tokenizer.address, fingerprint))
            table.row(*(rows[-1][name] for name in HEADER))
    if options.plot is not None:
        draw(rows, options.plot)
    report.save({"settings": report.settings, "rows": rows})
