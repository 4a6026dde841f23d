"""Load beyond capacity on a machine that others use too: default flags beside bounds that are known to be right.

    python -m benchmarks overload_beside [--seconds 320] [--transport asyncio grpc] [--alone | --beside] [--json FILE]

Two services of real processes on the demo model, of which one works at a time: at default flags, and as a control with
`--max-running-sequences 32 --max-queued-requests 32`. An open loop of `--times` the peak (a closed loop of 96 callers
at default flags, alone), each call with a deadline of twice the peak's median, goes to one and to the other in turn,
`--turn` seconds at a time, `--seconds` in all for each. Alone, and beside a program that takes half of the
processor for 20 s of every 40 (turns are whole periods of it, so that both have the same of it).

With --paced, steps sleep in place of the model, and --slowdown times as long in place of the program: what the forecast
does is then the same on any machine, however crowded.

Targets: goodput at least 90 % of the control's, accepted and lost at most 1 %, refusals within 50 ms at p99 (150 ms
beside the program), all with a pushback. With --timeline, every second: the seconds that calls made then were forecast
(from what the engine reports) and took.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks._overload_client import Client, Flow
from benchmarks._report import Report, Table

ROOT = Path(__file__).resolve().parents[1]

from factories.servers import stack
from penstock.common.pace import Demand
from penstock.router.backends.load_report import to_pace
from penstock.v1 import admin_pb2, admin_pb2_grpc

_BOUNDS = ("--max-running-sequences", "32", "--max-queued-requests", "32")
_CALLERS = 96
_COLUMNS = (
    "transport", "machine", "flags", "offered/s", "good/s", "of peak", "of control", "late waiting", "late running",
    "lost", "of accepted", "refused", "refusal p50 ms", "p99 ms", "client's lag p99 ms", "no pushback",
    "latency p50 s", "p99 s", "forecast off p50", "p99", "client's cpu", "thief's cpu",
)  # fmt: skip
# What the measurement itself may not decide: the services' default, which the tests' processes do without.
_ENVIRONMENT = {
    "PENSTOCK_TUNE_SECONDS": "1.5",
    "PENSTOCK_TEMPLATE_TIMEOUT_SECONDS": "5",
    # This tree, whichever is installed; another one, where it is named.
    "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT / "services")),
}


@dataclass
class Arm:
    """One of the two services, and what became of the calls to it."""

    name: str
    client: Client
    generation: str
    flow: Flow = field(default_factory=Flow)
    # Seconds during which calls were made, of them the client's processor time, and the thief's.
    seconds: float = 0.0
    client_cpu: float = 0.0
    thief_cpu: float = 0.0


@contextlib.contextmanager
def services(transport: str, arguments: argparse.Namespace, slow: Path, *flags: str) -> Any:
    """Run the three services; yield the addresses of router and generation. `slow`: steps are slow while it exists."""
    with contextlib.ExitStack() as exits:

        def start(role: str, *more: str, **settings: Any) -> stack.Process:
            process = stack.start(role, "--transport", transport, *more, **({"environment": _ENVIRONMENT} | settings))
            exits.callback(process.log.unlink, missing_ok=True)
            exits.callback(process.kill)
            process.wait_ready()
            return process

        paced: dict[str, Any] = {}
        if arguments.paced:
            pace = {"PACED_STEP": arguments.paced, "PACED_SLOW": f"{arguments.slowdown} {slow}"}
            paced["environment"] = _ENVIRONMENT | pace
            paced["program"] = (str(ROOT / "benchmarks" / "_paced_generation.py"),)
        generation, tokenizer = start("generation", *flags, **paced), start("tokenizer")
        router = start("router", "--tokenizer", tokenizer.address, "--backend", generation.address)
        yield router.address, generation.address


@contextlib.contextmanager
def thief(arguments: argparse.Namespace, slow: Path, *, is_there: bool) -> Any:
    """Run the other program; yield a list that has the processor seconds that it took in the end."""
    taken: list[float] = []
    if not is_there:
        yield taken
        return
    command = ["-m", "benchmarks._thief", "0" if arguments.paced else str(arguments.thieves)]
    command += [str(arguments.busy), str(arguments.period), *([str(slow)] if arguments.paced else [])]
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield taken
    finally:
        process.terminate()
        taken.append(float(process.communicate()[0] or 0.0))


async def watch_forecast(arm: Arm, demand: Demand) -> None:
    """Keep what the engine's figures forecast for a call, until cancelled."""
    async with grpc.aio.insecure_channel(arm.generation) as channel:
        stub = admin_pb2_grpc.GenerationAdminServiceStub(channel)
        async for response in stub.WatchLoad(admin_pb2.WatchLoadRequest()):
            pace = to_pace(response.load)
            seconds = pace.wait_seconds(demand) + pace.serving_seconds(demand)
            arm.client.forecast = seconds or None


async def turn(arm: Arm, rate: float, seconds: float, deadline: float, arguments: argparse.Namespace) -> None:
    """One turn of an arm, alone with its load."""
    demand = Demand("", arguments.prompt_words * 2, arguments.tokens)
    watch = asyncio.create_task(watch_forecast(arm, demand))
    cpu, began = time.process_time(), time.monotonic()
    flow = await arm.client.open_loop(rate, seconds, deadline)
    arm.client_cpu += (time.process_time() - cpu) * seconds / (time.monotonic() - began)
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    arm.seconds += seconds
    into = arm.flow
    for name in ("good", "refusals", "late_waiting", "late_running", "lags"):
        getattr(into, name).extend(getattr(flow, name))
    into.without_pushback += flow.without_pushback
    into.lost += flow.lost
    if arguments.timeline:
        timeline(arm.name, flow, began)


def timeline(name: str, flow: Flow, began: float) -> None:
    """Print what calls of each second were forecast, and took."""
    by_second: dict[int, list[tuple[float, float | None]]] = {}
    for at, seconds, forecast in flow.good:
        by_second.setdefault(int(at - began), []).append((seconds, forecast))
    late = Counter(int(at - began) for at in (*flow.late_waiting, *flow.late_running))
    print(f"{name}: second, accepted and answered, late, forecast s, took s (mean, most)")
    for second in range(max([*by_second, *late, 0]) + 1):
        calls = by_second.get(second, [])
        forecasts = [forecast for _, forecast in calls if forecast is not None]
        took = [seconds for seconds, _ in calls]
        print(
            f"{second:4d} {len(calls):5d} {late[second]:5d} {mean(forecasts):7.2f} {mean(took):7.2f} "
            f"{max(took, default=0.0):7.2f}",
            flush=True,
        )


async def measure(transport: str, arguments: argparse.Namespace, table: Table) -> list[dict[str, Any]]:
    """Both arms on one transport, alone and beside the thief."""
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="penstock-overload-") as folder,
        services(transport, arguments, Path(folder) / "slow") as default,
        services(transport, arguments, Path(folder) / "slow", *_BOUNDS) as bounded,
    ):
        slow = Path(folder) / "slow"
        arms = []
        for name, (router, generation) in (("default", default), ("32 and 32", bounded)):
            client = Client(arguments.prompt_words, arguments.tokens, seed=len(arms))
            await client.connect(router)
            arms.append(Arm(name, client, generation))
            # A process is slow at first.
            await client.closed_loop(_CALLERS, arguments.warm)
        flow = await arms[0].client.closed_loop(_CALLERS, arguments.peak_seconds)
        peak = peak_of(flow)
        deadline = arguments.deadline or 2 * quantile([took for _, took, _ in flow.good], 0.5)
        table.line(f"\n{transport}: peak {peak:.1f}/s, deadline {deadline:.2f} s\n")
        for is_beside in ([False] if not arguments.beside else []) + ([True] if not arguments.alone else []):
            for arm in arms:
                arm.flow, arm.seconds, arm.client_cpu, arm.thief_cpu = Flow(), 0.0, 0.0, 0.0
            while arms[0].seconds < arguments.seconds:
                for arm in arms if int(arms[0].seconds / arguments.turn) % 2 == 0 else arms[::-1]:
                    with thief(arguments, slow, is_there=is_beside) as taken:
                        await turn(arm, arguments.times * peak, arguments.turn, deadline, arguments)
                    arm.thief_cpu += sum(taken)
            for arm in arms[::-1]:
                control = len(arms[1].flow.good) / arms[1].seconds
                row = row_of(transport, "beside" if is_beside else "alone", arm, arguments.times * peak, peak, control)
                rows.append(row)
                table.row(*row.values())
        for arm in arms:
            arm.client.close()
    return rows


def row_of(transport: str, machine: str, arm: Arm, offered: float, peak: float, control: float) -> dict[str, Any]:
    """Figures of one arm."""
    flow, good = arm.flow, len(arm.flow.good) / arm.seconds
    off = [took / forecast for _, took, forecast in flow.good if forecast]
    lost = flow.late + flow.lost.total()
    return {
        "transport": transport,
        "machine": machine,
        "flags": arm.name,
        "offered": round(offered, 1),
        "good": round(good, 1),
        "of_peak": round(good / peak, 3),
        "of_control": round(good / control, 3) if control else 0.0,
        "late_waiting": len(flow.late_waiting),
        "late_running": len(flow.late_running),
        "lost": dict(flow.lost),
        "of_accepted": round(lost / max(flow.accepted, 1), 4),
        "refused": len(flow.refusals),
        "refusal_p50_ms": round(1e3 * quantile(flow.refusals, 0.5), 1),
        "refusal_p99_ms": round(1e3 * quantile(flow.refusals, 0.99), 1),
        "lag_p99_ms": round(1e3 * quantile(flow.lags, 0.99), 1),
        "without_pushback": flow.without_pushback,
        "p50": round(quantile([took for _, took, _ in flow.good], 0.5), 3),
        "p99": round(quantile([took for _, took, _ in flow.good], 0.99), 3),
        "off_p50": round(quantile(off, 0.5), 2),
        "off_p99": round(quantile(off, 0.99), 2),
        "client_cpu": round(arm.client_cpu / arm.seconds, 3),
        "thief_cpu": round(arm.thief_cpu / arm.seconds, 3),
    }


def peak_of(flow: Flow) -> float:
    """Answers a second of a closed loop: of those that began while it was full, after its first round."""
    ends = sorted(at + took for at, took, _ in flow.good)
    middle = ends[_CALLERS // 2 : len(ends) - _CALLERS // 2]
    if len(middle) < 2:
        raise SystemExit("too few answers at the peak: raise --peak-seconds")
    return len(middle) / (middle[-1] - middle[0])


def quantile(values: list[float], share: float) -> float:
    """The value that so large a share does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def mean(values: list[float]) -> float:
    """The mean; 0 of none."""
    return sum(values) / len(values) if values else 0.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--seconds", type=float, default=320.0, help="of load for each of the two, alone and beside")
    parser.add_argument("--turn", type=float, default=80.0, help="seconds of one's turn: whole periods of the program")
    parser.add_argument("--transport", nargs="+", choices=("asyncio", "grpc"), default=["asyncio", "grpc"])
    parser.add_argument("--alone", action="store_true", help="without the other program only")
    parser.add_argument("--beside", action="store_true", help="with the other program only")
    parser.add_argument("--thieves", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="its busy processes")
    parser.add_argument("--busy", type=float, default=20.0, help="seconds of every period that it is busy")
    parser.add_argument("--period", type=float, default=40.0)
    parser.add_argument("--times", type=float, default=3.0, help="load over the peak")
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds; 0: twice the median at the peak")
    parser.add_argument("--peak-seconds", type=float, default=20.0)
    parser.add_argument("--warm", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--prompt-words", type=int, default=30)
    parser.add_argument("--paced", metavar="STEP", help='seconds of a step and of each row, such as "0.02 0.0005"')
    parser.add_argument("--slowdown", type=float, default=2.0, help="with --paced: of steps, in place of the program")
    parser.add_argument("--timeline", action="store_true", help="print forecasts and times of every second")


def main(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    table, rows = report.table(_COLUMNS), []
    for transport in arguments.transport:
        rows += asyncio.run(measure(transport, arguments, table))
    report.save({"settings": report.settings, "rows": rows})
