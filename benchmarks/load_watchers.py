"""Cost of load reports to a generation service: processor time with 0, 1 and 20 routers that watch its load.

    python -m benchmarks load_watchers [--watchers 0,1,20] [--tokens 400] [--rest-seconds 5]

A service of the embedded model, and WatchLoad calls as routers make them (every 0.1 s at most). The processor time of
the service is read from /proc: at rest, and while it answers greedy requests of `--tokens` one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import grpc
from factories.servers import stack
from penstock.router.config import RouterConfig
from penstock.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

from benchmarks._arguments import at_least, parts
from benchmarks._report import Report
from benchmarks.router_scale import cpu_seconds

HEADER = ("watchers", "rest_cpu_share", "reports_a_second", "token_cpu_us", "reports_in_all")
ANSWERS = 3


class Watchers:
    """WatchLoad calls, each on a connection of its own."""

    def __init__(self, address: str, count: int) -> None:
        self._address, self._count = address, count
        self.reports = 0

    async def __aenter__(self) -> Watchers:
        self._tasks = [asyncio.create_task(self._watch()) for _ in range(self._count)]
        while self.reports < self._count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub: Any = admin_pb2_grpc.GenerationAdminServiceStub(channel)
            asked = admin_pb2.WatchLoadRequest(min_interval_seconds=RouterConfig.load_interval_seconds)
            async for _ in stub.WatchLoad(asked):
                self.reports += 1


async def answer(address: str, tokens: int) -> None:
    """Have one greedy answer made."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(prompt_token_ids=[300, 301, 302])
        request.config.max_new_tokens, request.config.do_sample = tokens, False
        request.stop.ignore_eos = True
        async for _ in stub.Generate(request):
            pass


async def measure(process: stack.Process, watchers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of so many watchers."""
    pid = process.popen.pid
    async with Watchers(process.address, watchers) as watching:
        before, begun, reports = cpu_seconds(pid), time.monotonic(), watching.reports
        await asyncio.sleep(options.rest_seconds)
        seconds = time.monotonic() - begun
        rest, told = (cpu_seconds(pid) - before) / seconds, (watching.reports - reports) / seconds
        before, reports = cpu_seconds(pid), watching.reports
        for _ in range(ANSWERS):
            await answer(process.address, options.tokens)
        return {
            "watchers": watchers,
            "rest_cpu_share": round(rest, 4),
            "reports_a_second": round(told, 1),
            "token_cpu_us": round(1e6 * (cpu_seconds(pid) - before) / (ANSWERS * options.tokens)),
            "reports_in_all": watching.reports - reports,
        }


def counts(text: str) -> list[int]:
    """Type of a flag for a list of whole numbers from 0 on, with commas."""
    return [at_least(0)(one) for one in parts(text)]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--watchers", type=counts, default=[0, 1, 20])
    parser.add_argument("--tokens", type=at_least(2), default=400)
    parser.add_argument("--rest-seconds", type=float, default=5.0)


def main(options: argparse.Namespace, report: Report) -> None:
    """Run it."""
    process = stack.start("generation", "--threads", "1")
    try:
        stack.wait_serving(process.address, process)
        asyncio.run(answer(process.address, options.tokens))
        table, rows = report.table(HEADER), []
        for count in options.watchers:
            rows.append(asyncio.run(measure(process, count, options)))
            table.row(*(rows[-1][name] for name in HEADER))
        report.save({"settings": report.settings, "rows": rows})
    finally:
        process.kill()
