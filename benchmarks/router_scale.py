"""Cost of a router before 10, 100 and 1,000 backends: processor a request and a token, memory, rest, first token.

    python -m benchmarks router_scale [--backends 10,100,1000] [--requests 300] [--tokens 64] [--concurrency 16]

Backends without a model (tests/factories/servers/emitting_backend.py), in a few processes, each on a port of its own.
The router and the tokenizer are processes as in production. The router's processor time is read from /proc: at rest,
and for requests of one token and of `--tokens`, with prompts of 512 ids, the first half one of 50 beginnings.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import time
import urllib.request
from contextlib import ExitStack
from typing import Any

import grpc
from factories.servers import stack
from factories.servers.emitting_backend import EmittingBackend, count_up
from penstock.v1 import text_pb2, text_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

from benchmarks._arguments import at_least, numbers
from benchmarks._report import Report

EMITTERS, START_SECONDS = 4, 300
HEADER = (
    "backends",
    "ready_s",
    "start_cpu_s",
    "rest_cpu_share",
    "rss_mib",
    "request_cpu_ms",
    "token_cpu_us",
    "first_word_ms",
)
TICKS = os.sysconf("SC_CLK_TCK")


def emit(count: int, tokens: int, fingerprint: str, told: Any, stop: Any) -> None:
    """Run backends until `stop`; tell their addresses."""

    async def run() -> None:
        backends = [
            await EmittingBackend(script=count_up(tokens), fingerprint=fingerprint, max_queued=1024).start()
            for _ in range(count)
        ]
        told.put([one.address for one in backends])
        await asyncio.to_thread(stop.wait)

    asyncio.run(run())


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mib(pid: int) -> float:
    """Return the memory of a process."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def ask(address: str, count: int, tokens: int, concurrency: int) -> float:
    """Send requests, so many at a time; return the median seconds to the first token."""
    rng, first = random.Random(count), list[float]()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = text_pb2_grpc.TextServiceStub(channel)

        async def one() -> None:
            head = random.Random(rng.randrange(50))
            ids = [head.randrange(300, 4000) for _ in range(256)] + [rng.randrange(300, 4000) for _ in range(256)]
            request = text_pb2.GenerateTextRequest()
            request.token_ids.ids.extend(ids)
            request.config.max_new_tokens = tokens
            begun, is_first = time.monotonic(), True
            async for event in stub.Generate(request):
                if is_first and event.HasField("delta"):
                    first.append(time.monotonic() - begun)
                    is_first = False

        left = count

        async def worker() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await one()

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return sorted(first)[len(first) // 2]


def backends_up(metrics_address: str) -> int:
    """Return the number of backends that are up, by the router's metrics."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith("penstock_router_backend_up{"))


def wait_until_up(router: stack.Process, count: int) -> None:
    """Return once all backends are up."""
    router.wait_ready()
    deadline = time.monotonic() + START_SECONDS
    while (up := backends_up(router.metrics_address)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{up} of {count} backends are up after {START_SECONDS} s:\n{router.output()[-2000:]}")
        time.sleep(0.2)


def measure(count: int, options: argparse.Namespace, tokenizer: str, fingerprint: str) -> dict[str, Any]:
    """Start backends and a router, and measure it."""
    spawn = multiprocessing.get_context("spawn")
    told, stop = spawn.Queue(), spawn.Event()
    shares = [count // EMITTERS + (place < count % EMITTERS) for place in range(EMITTERS)]
    emitters = [
        spawn.Process(target=emit, args=(share, options.tokens, fingerprint, told, stop), daemon=True)
        for share in shares
        if share
    ]
    router = None
    try:
        for emitter in emitters:
            emitter.start()
        addresses = [address for _ in emitters for address in told.get(timeout=120)]
        begun = time.monotonic()
        router = stack.start("router", "--tokenizer", tokenizer, "--backend", ",".join(addresses))
        wait_until_up(router, count)
        ready, pid = time.monotonic() - begun, router.popen.pid
        start_cpu = cpu_seconds(pid)
        time.sleep(1.0)
        before, begun = cpu_seconds(pid), time.monotonic()
        time.sleep(options.rest_seconds)
        rest = (cpu_seconds(pid) - before) / (time.monotonic() - begun)
        # The first requests load what is needed.
        asyncio.run(ask(router.address, 20, options.tokens, options.concurrency))
        costs, first = [], 0.0
        for tokens in (1, options.tokens):
            before, begun = cpu_seconds(pid), time.monotonic()
            first = asyncio.run(ask(router.address, options.requests, tokens, options.concurrency))
            took = time.monotonic() - begun
            costs.append((cpu_seconds(pid) - before - rest * took) / options.requests)
        return {
            "backends": count,
            "ready_s": round(ready, 1),
            "start_cpu_s": start_cpu,
            "rest_cpu_share": round(rest, 3),
            "rss_mib": round(rss_mib(pid), 1),
            "request_cpu_ms": round(1e3 * costs[0], 3),
            "token_cpu_us": round(1e6 * (costs[1] - costs[0]) / (options.tokens - 1), 1),
            "first_word_ms": round(1e3 * first, 1),
        }
    finally:
        if router is not None:
            router.kill()
        stop.set()
        for emitter in emitters:
            emitter.kill()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--backends", type=numbers, default=[10, 100, 1000])
    parser.add_argument("--requests", type=at_least(16), default=300)
    parser.add_argument("--tokens", type=at_least(2), default=64)
    parser.add_argument("--concurrency", type=at_least(1), default=16)
    parser.add_argument("--rest-seconds", type=float, default=5.0)


def main(options: argparse.Namespace, report: Report) -> None:
    """Run it."""
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
        report.save({"settings": report.settings, "rows": rows})
