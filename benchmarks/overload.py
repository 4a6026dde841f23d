"""Load beyond capacity, through router, tokenizer and generation at default flags: what is answered, refused and lost.

    python -m benchmarks overload [--seconds 60] [--transport asyncio grpc] [--step SECONDS] [--model] [--json FILE]

Four phases each: the peak (a closed loop); an open loop of `--times` the peak with a deadline; tenant B alone at a
tenth of the peak; B again beside tenant A's open loop. Targets: goodput at least 90 % of the peak, refusals within
50 ms at p99 and with a pushback, every call ended, B's p99 at most twice its own. Steps sleep by `--step` (seconds,
and seconds for each row), so that the figures do not depend on the machine; with --model they are the demo model's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks._report import Report, Table

ROOT = Path(__file__).resolve().parents[1]

from factories.servers import stack
from penstock.v1 import config_pb2, text_pb2, text_pb2_grpc

_WORDS = ("river", "stone", "lamp", "cloud", "garden", "winter", "paper", "silver", "road", "music", "forest", "window")
_COLUMNS = (
    "transport", "phase", "offered/s", "good/s", "of peak", "late", "refused", "refusal p99 ms", "other call p99 ms",
    "no pushback", "lost", "latency p50 s", "p99 s",
)  # fmt: skip


@dataclass
class Flow:
    """Ends of one tenant's calls."""

    good: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    # Times of ListModels beside them, which waits for nothing: what machine, client and event loop take by themselves.
    others: list[float] = field(default_factory=list)
    late: int = 0
    without_pushback: int = 0
    # Anything else, by status: none is to be expected.
    lost: Counter[str] = field(default_factory=Counter)


class Client:
    """Calls of one tenant, over a few connections."""

    def __init__(self, address: str, token: str, arguments: argparse.Namespace, channels: int = 4) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(address, options) for _ in range(channels)]
        self._stubs: list[Any] = [text_pb2_grpc.TextServiceStub(channel) for channel in self._channels]
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._arguments = arguments
        self._random = random.Random(token)

    async def close(self) -> None:
        """Disconnect."""
        for channel in self._channels:
            await channel.close()

    async def call(self, flow: Flow, deadline: float | None) -> None:
        """Make one call and note its end."""
        arguments = self._arguments
        request = text_pb2.GenerateTextRequest(
            text=" ".join(self._random.choices(_WORDS, k=arguments.prompt_words)),
            config=config_pb2.GenerationConfig(max_new_tokens=arguments.tokens),
            stop=config_pb2.StopConfig(ignore_eos=True),
        )
        stub, began = self._random.choice(self._stubs), time.monotonic()
        call, finished = stub.Generate(request, metadata=self._metadata, timeout=deadline), False
        try:
            async for event in call:
                finished = finished or event.HasField("finished")
            seconds = time.monotonic() - began
            if finished:
                flow.good.append(seconds)
            else:
                flow.lost["OK without Finished"] += 1
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                flow.refusals.append(time.monotonic() - began)
                pushback = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms", "-1")
                flow.without_pushback += int(pushback) < 0
            elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                flow.late += 1
            else:
                flow.lost[error.code().name] += 1

    async def probe(self, flow: Flow) -> None:
        """Call ListModels ten times a second until cancelled."""
        while True:
            began = time.monotonic()
            await self._stubs[0].ListModels(text_pb2.ListModelsRequest(), metadata=self._metadata)
            flow.others.append(time.monotonic() - began)
            await asyncio.sleep(0.1)

    async def closed_loop(self, flow: Flow, callers: int, seconds: float) -> None:
        """Keep `callers` calls going."""
        until = time.monotonic() + seconds

        async def caller() -> None:
            while time.monotonic() < until:
                await self.call(flow, None)

        await asyncio.gather(*(caller() for _ in range(callers)))

    async def open_loop(self, flow: Flow, rate: float, seconds: float, deadline: float | None) -> None:
        """Make calls at random times, `rate` a second, whatever becomes of them; return when all have ended."""
        calls: list[asyncio.Task[None]] = []
        probe = asyncio.create_task(self.probe(flow))
        at = time.monotonic()
        until = at + seconds
        while (at := at + self._random.expovariate(rate)) < until:
            await asyncio.sleep(max(at - time.monotonic(), 0))
            calls.append(asyncio.create_task(self.call(flow, deadline)))
        probe.cancel()
        await asyncio.gather(*calls)


@contextlib.contextmanager
def services(transport: str, arguments: argparse.Namespace, folder: Path) -> Any:
    """Run the three services at default flags; yield the router's address."""
    tokens = folder / "tokens"
    tokens.write_text("tenant-a\ntenant-b\n")
    with contextlib.ExitStack() as exits:

        def start(role: str, *flags: str, **settings: Any) -> stack.Process:
            process = stack.start(role, "--transport", transport, *flags, **settings)
            exits.callback(process.log.unlink, missing_ok=True)
            exits.callback(process.kill)
            process.wait_ready()
            return process

        paced: dict[str, Any] = {"program": (str(ROOT / "benchmarks" / "_paced_generation.py"),)}
        environment = {"PACED_STEP": arguments.step, "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT / "services"))}
        generation = start("generation", **({} if arguments.model else paced | {"environment": environment}))
        tokenizer = start("tokenizer")
        where = ("--tokenizer", tokenizer.address, "--backend", generation.address)
        yield start("router", *where, "--auth-token-file", str(tokens)).address


async def measure(transport: str, address: str, arguments: argparse.Namespace, table: Table) -> list[dict[str, Any]]:
    """All phases on one transport."""
    seconds, rows = arguments.seconds, []
    a, b = Client(address, "tenant-a", arguments), Client(address, "tenant-b", arguments, channels=1)

    def note(phase: str, flow: Flow, offered: float, peak: float) -> dict[str, Any]:
        row = {
            "transport": transport,
            "phase": phase,
            "offered": round(offered, 1),
            "good": round(len(flow.good) / seconds, 1),
            "of_peak": round(len(flow.good) / seconds / peak, 3) if peak else 1.0,
            "late": flow.late,
            "refused": len(flow.refusals),
            "refusal_p99_ms": round(1e3 * quantile(flow.refusals, 0.99), 1),
            "other_p99_ms": round(1e3 * quantile(flow.others, 0.99), 1),
            "without_pushback": flow.without_pushback,
            "lost": dict(flow.lost),
            "p50": round(quantile(flow.good, 0.5), 3),
            "p99": round(quantile(flow.good, 0.99), 3),
        }
        rows.append(row)
        table.row(*row.values())
        return row

    warm = Flow()
    await a.closed_loop(warm, 64, min(seconds, 5.0))
    flow = Flow()
    await a.closed_loop(flow, 96, seconds)
    peak = note("peak", flow, 0.0, 0.0)["good"]
    deadline = arguments.deadline or 2 * quantile(flow.good, 0.5)
    flow = Flow()
    await a.open_loop(flow, arguments.times * peak, seconds, deadline)
    note(f"{arguments.times:g}x, deadline {deadline:.1f} s", flow, arguments.times * peak, peak)
    await asyncio.sleep(1.0)
    flow = Flow()
    await b.open_loop(flow, arguments.quiet * peak, seconds, None)
    solo = note("B alone", flow, arguments.quiet * peak, peak)
    flood, flow = Flow(), Flow()

    async def quiet() -> None:
        await asyncio.sleep(min(5.0, seconds / 4))
        await b.open_loop(flow, arguments.quiet * peak, seconds, None)

    flooding = a.open_loop(flood, arguments.times * peak, seconds + 2 * min(5.0, seconds / 4), deadline)
    await asyncio.gather(flooding, quiet())
    note("A's flood", flood, arguments.times * peak, peak)
    beside = note("B beside it", flow, arguments.quiet * peak, peak)
    table.line(f"\n{transport}: B's p99 beside A's flood is {beside['p99'] / solo['p99']:.2f} of its own.\n")
    for client in (a, b):
        await client.close()
    return rows


def quantile(values: list[float], share: float) -> float:
    """The value that so large a share does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--transport", nargs="+", choices=("asyncio", "grpc"), default=["asyncio", "grpc"])
    parser.add_argument("--times", type=float, default=3.0, help="open-loop load over the peak")
    parser.add_argument("--quiet", type=float, default=0.1, help="load of tenant B over the peak")
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds; 0: twice the median at the peak")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--prompt-words", type=int, default=30)
    parser.add_argument("--step", default="0.02 0.0005", help="seconds of a step, and of each of its rows")
    parser.add_argument("--model", action="store_true", help="the demo model in place of steps that sleep")


def main(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    table, rows = report.table(_COLUMNS), []
    for transport in arguments.transport:
        with (
            tempfile.TemporaryDirectory(prefix="penstock-overload-") as folder,
            services(transport, arguments, Path(folder)) as address,
        ):
            rows += asyncio.run(measure(transport, address, arguments, table))
    report.save({"settings": report.settings, "rows": rows})
