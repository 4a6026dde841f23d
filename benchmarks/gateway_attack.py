"""A gateway while callers without a token try every known trick on its HTTP, plain and over TLS.

A real gateway, router and tokenizer, and a backend that emits an id each 20 ms; the router asks for a token. An
authorised stream, short authorised requests and probes of health run all the time: in quiet phases and beside the
trick, in `--rounds` turns, and for `--after` seconds behind it. This process has the processor whenever it wants it
(SCHED_FIFO, where it may). The attacker (`factories/wire/http_attacker.py`) is a process of its own that takes what is
left (SCHED_IDLE) and sends no more than it is told to; what it took of the processor is told. A row for each trick
(`factories/wire/http_tricks.py`) is printed, and the bounds that were broken; the exit status is 1 where one was.

    python -m benchmarks gateway_attack --seconds 60 --out attack.json
    python -m benchmarks gateway_attack --seconds 10 --trick trailers --trick "half-sent bodies" --way tls
    python -m benchmarks gateway_attack --seconds 60 --together     # all tricks in turn, in one row
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._report import Report

ROOT = Path(__file__).resolve().parents[1]
import psutil
from factories.servers.gateway_tree import CA, TOKEN, GatewayTree, gateway_tree
from factories.wire.http_tricks import HttpTrick, tricks_for

from benchmarks._arguments import at_least
from benchmarks._http_probe import Figures, Probe
from benchmarks._processes import ending_with_us
from benchmarks._report import Table

_HEADER = (
    "trick",
    "MiB more",
    "left",
    "gap p50/p99/max ms, quiet",
    "under attack",
    "health p50/p99/max ms, quiet",
    "under attack",
    "lateness of the machine",
    "failed",
    "log kB",
    "attacker: connections (refused), MiB, CPU",
    "its answers",
    "gateway CPU",
    "broken",
)
_MIB = 1 << 20
# A machine that others use, too, makes a stream wait so long for once.
_LONGEST_SECONDS = 0.25
_STEP_SECONDS = 0.02
_RECOVERY_TRIES, _RECOVERY_SECONDS = 120, 1.0
# An answer of so many tokens takes a quarter of a minute.
_STREAM_TOKENS = 750


@dataclasses.dataclass
class Row:
    """Figures of one trick."""

    trick: str
    more_mib: float
    left_mib: float
    quiet: Figures
    attacked: Figures
    # Seen behind it: a server that stood still tells then for how long.
    behind: Figures
    log_bytes: int
    attacker: dict[str, Any]
    # Share of a core.
    gateway_cpu: float
    is_running: bool

    def is_judged(self, bounds: argparse.Namespace) -> bool:
        """False where the machine itself was late, so that times tell nothing of the gateway."""
        return all(one.p(one.lags, 0.99) <= bounds.most_late_ms for one in (self.quiet, self.attacked))

    def broken(self, bounds: argparse.Namespace) -> list[str]:
        """Bounds that did not hold."""
        quiet, then, behind = self.quiet, self.attacked, self.behind
        late = max([*then.lags, *behind.lags], default=0.0)
        longest = max([*then.gaps, *behind.gaps], default=0.0) - late
        found = {
            "ended": not self.is_running,
            "memory": self.more_mib > bounds.more_mib,
            "left": self.left_mib > bounds.left_mib,
            "no stream": not then.gaps,
            "no health": not then.health,
            "longest gap": longest > max(_LONGEST_SECONDS, bounds.times * max(quiet.gaps, default=0.0)),
            "failed": bool(then.failures or behind.failures),
            "500": any(status == "500" for status in self.attacker["statuses"]),
            "log": self.log_bytes > bounds.log_bytes,
        }
        if self.is_judged(bounds):
            for name in ("gaps", "health"):
                before, beside = getattr(quiet, name), getattr(then, name)
                found[name] = then.p(beside, 0.99) > bounds.times * quiet.p(before, 0.99)
        return [name for name, is_broken in found.items() if is_broken]

    def cells(self, bounds: argparse.Namespace) -> list[str]:
        """Cells of the table."""
        quiet, then, did = self.quiet, self.attacked, self.attacker
        failures = then.failures + self.behind.failures
        failed = ", ".join(f"{count} {what}" for what, count in failures.most_common(3))
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(did["statuses"].items()))
        return [
            self.trick,
            f"{self.more_mib:+.0f}",
            f"{self.left_mib:+.0f}",
            quiet.told("gaps"),
            then.told("gaps", self.behind.gaps),
            quiet.told("health"),
            then.told("health", self.behind.health),
            then.told("lags"),
            failed or "-",
            f"{self.log_bytes / 1000:.0f}",
            f"{did['connections']} ({did['refused']}), {did['sent_bytes'] / _MIB:.0f}, {did['cpu_seconds']:.1f} s",
            statuses or "-",
            f"{100 * self.gateway_cpu:.0f} %",
            ", ".join(self.broken(bounds)) or ("-" if self.is_judged(bounds) else "times not judged"),
        ]

    def facts(self, bounds: argparse.Namespace) -> dict[str, Any]:
        """The row for a file."""
        found = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        phases = {name: getattr(self, name).facts() for name in ("quiet", "attacked", "behind")}
        return {**found, **phases, "broken": self.broken(bounds)}


class Memory:
    """Largest memory of the gateway since the last look."""

    def __init__(self, tree: GatewayTree) -> None:
        self._tree, self._peak = tree, 0

    async def watch(self) -> None:
        """Look all the time."""
        with contextlib.suppress(psutil.Error):
            while True:
                self._peak = max(self._peak, self._tree.rss_bytes)
                await asyncio.sleep(0.1)

    def take(self) -> int:
        """Return the most until now, and begin anew."""
        with contextlib.suppress(psutil.Error):
            self._peak = max(self._peak, self._tree.rss_bytes)
        peak, self._peak = self._peak, 0
        return peak


async def _attacked_by(arguments: argparse.Namespace, tree: GatewayTree, tricks: Sequence[HttpTrick]) -> dict[str, Any]:
    """Let an attacker play these tricks; return what it did."""
    command = [
        "-m",
        "factories.wire.http_attacker",
        tree.address,
        "--seconds",
        str(arguments.seconds / arguments.rounds),
    ]
    for trick in tricks:
        command += ["--trick", trick.name]
    command += ["--connections", str(arguments.connections), "--mib-per-second", str(arguments.mib_per_second)]
    command += ["--attempts-per-second", str(arguments.attempts_per_second), "--token", TOKEN]
    command += ["--source", arguments.source, *(["--ca", CA] if tree.is_tls else [])]
    paths = os.pathsep.join(str(ROOT / part) for part in ("tests", "services", "clients/python"))
    attacker = await asyncio.create_subprocess_exec(
        *ending_with_us(sys.executable, *command),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        # It stops by itself; the time beyond is for its own start, and for a machine that is busy.
        async with asyncio.timeout(arguments.seconds + 60):
            out, _ = await attacker.communicate()
    finally:
        if attacker.returncode is None:
            attacker.kill()
            await attacker.wait()
    if attacker.returncode:
        raise RuntimeError(f"the attacker ended with {attacker.returncode}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


async def _row(
    arguments: argparse.Namespace, tree: GatewayTree, probe: Probe, memory: Memory, tricks: Sequence[HttpTrick]
) -> Row:
    quiet, attacked, used, before, log = Figures(), Figures(), 0.0, tree.rss_bytes, tree.log_bytes
    did: dict[str, Any] = {}
    memory.take()
    process = tree.process
    # In turns, since a cloud's machine is not equally fast all the time.
    for number in range(arguments.rounds):
        if number:
            await _recovered(tree)
        probe.turn()
        await asyncio.sleep(arguments.quiet)
        quiet.add(probe.turn())
        begin, cpu = time.monotonic(), _cpu_seconds(process)
        _add(did, await _attacked_by(arguments, tree, tricks))
        used += (_cpu_seconds(process) - cpu) / (time.monotonic() - begin) / arguments.rounds
        attacked.add(probe.turn())
    peak = memory.take()
    await asyncio.sleep(arguments.after)
    left = tree.rss_bytes if tree.is_running else 0
    await _recovered(tree)
    behind = probe.turn()
    name = tricks[0].name if len(tricks) == 1 else f"{len(tricks)} tricks in turn"
    more, kept = ((size - before) / _MIB for size in (peak, left))
    return Row(name, more, kept, quiet, attacked, behind, tree.log_bytes - log, did, used, tree.is_running)


def _add(did: dict[str, Any], later: dict[str, Any]) -> None:
    """Take in what the attacker did in a later phase."""
    for name, value in later.items():
        did[name] = Counter(did.get(name, {})) + Counter(value) if isinstance(value, dict) else did.get(name, 0) + value


async def _recovered(tree: GatewayTree) -> None:
    """Return once the gateway answers at once again, so that the next trick begins in quiet; or after a while."""
    for _ in range(_RECOVERY_TRIES):
        begin = time.monotonic()
        status = await asyncio.to_thread(tree.health, _RECOVERY_SECONDS)
        if not tree.is_running or (status == 200 and time.monotonic() - begin < _RECOVERY_SECONDS / 2):
            return
        await asyncio.sleep(_RECOVERY_SECONDS)


def _cpu_seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _go_first() -> None:
    """Let this process, which measures, wake up at once: callers have machines of their own. Children go as usual."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def _chosen(arguments: argparse.Namespace, is_tls: bool) -> list[list[HttpTrick]]:
    """Tricks of each row."""
    known = tricks_for(is_tls)
    if unknown := set(arguments.trick) - set(tricks_for(True)):
        sys.exit(f"--trick: none of {', '.join(sorted(unknown))}; there are\n" + "\n".join(tricks_for(True)))
    found = [trick for name, trick in known.items() if not arguments.trick or name in arguments.trick]
    if arguments.together:
        return [[trick for trick in found if trick.connections is None or arguments.trick]]
    return [[trick] for trick in found]


async def _measure(arguments: argparse.Namespace, is_tls: bool) -> list[Row]:
    """Rows of one way; they are printed as they come."""
    rows: list[Row] = []
    flags = [part for flag in arguments.flag for part in flag.split("=", 1)]
    with gateway_tree(*flags, is_tls=is_tls, tree=arguments.tree, step_seconds=_STEP_SECONDS) as tree:
        print(f"\n{'HTTP over TLS' if is_tls else 'HTTP'}\n", flush=True)
        table = Table(_HEADER, arguments.json)
        probe = Probe(tree.address, TOKEN, tree.tls, health_seconds=arguments.health, stream_tokens=_STREAM_TOKENS)
        memory = Memory(tree)
        watching = asyncio.ensure_future(memory.watch())
        try:
            async with probe.running():
                # What the first requests load, and the memory of that, is no trick's.
                await asyncio.sleep(arguments.quiet)
                begin = tree.rss_bytes
                for tricks in _chosen(arguments, is_tls):
                    rows.append(await _row(arguments, tree, probe, memory, tricks))
                    table.row(*rows[-1].cells(arguments))
                    if not tree.is_running:
                        print(f"the gateway has ended:\n{tree.gateway.output()[-2000:]}")
                        break
                else:
                    more = (tree.rss_bytes - begin) / _MIB
                    print(f"\nMemory: {more:+.0f} MiB in all, log {tree.log_bytes / 1000:.0f} kB")
        finally:
            watching.cancel()
    return rows


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--seconds", type=float, default=60.0, help="of each trick")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="phases of a trick, a quiet one before each")
    parser.add_argument("--quiet", type=float, default=10.0, help="seconds of a quiet phase")
    parser.add_argument("--after", type=float, default=10.0, help="seconds behind it, until memory is looked at")
    parser.add_argument("--way", choices=("http", "tls", "both"), default="both")
    parser.add_argument("--trick", action="append", default=[], help="only this; may be repeated")
    parser.add_argument("--together", action="store_true", help="all in turn, 2 s each on a connection, in one row")
    parser.add_argument("--connections", type=at_least(1), default=10, help="of tricks without a number of their own")
    parser.add_argument("--mib-per-second", type=float, default=64.0, help="that the attacker sends at most")
    parser.add_argument("--attempts-per-second", type=float, default=300.0, help="of the attacker to connect, at most")
    parser.add_argument(
        "--source",
        default="127.0.0.2",
        help="loopback address of the attacker; callers have 127.0.0.1 (the same: neighbours behind one)",
    )
    parser.add_argument("--health", type=float, default=0.05, help="seconds between two probes of health")
    parser.add_argument("--times", type=float, default=2.0, help="bound: gap and health of quiet, times this")
    parser.add_argument(
        "--most-late-ms",
        type=float,
        default=_STEP_SECONDS * 1000,
        help="p99s are judged while the probe itself wakes up no later than so at its p99; the longest gap always is",
    )
    parser.add_argument("--more-mib", type=float, default=64.0, help="bound: memory during a trick")
    parser.add_argument("--left-mib", type=float, default=16.0, help="bound: memory behind it")
    parser.add_argument("--log-bytes", type=int, default=1_000_000, help="bound: log of a trick")
    parser.add_argument("--tree", type=Path, help="source tree whose gateway is attacked; this one when left out")
    parser.add_argument("--flag", action="append", default=[], help="further flag of the gateway, --NAME=VALUE")


def main(arguments: argparse.Namespace, report: Report) -> int:
    """Measure, and report it."""
    _go_first()
    rows: dict[str, list[Row]] = {}
    for way in ("http", "tls"):
        if arguments.way in (way, "both"):
            rows[way] = asyncio.run(_measure(arguments, way == "tls"))
    facts = {way: [row.facts(arguments) for row in some] for way, some in rows.items()}
    report.save(facts)
    broken = [(way, row.trick, names) for way, some in rows.items() for row in some if (names := row.broken(arguments))]
    unjudged = sum(not row.is_judged(arguments) for some in rows.values() for row in some)
    print(f"\n{sum(map(len, rows.values()))} tricks played, {len(broken)} broke a bound; p99s of {unjudged} not judged")
    for way, trick, names in broken:
        print(f"{way}: {trick}: {', '.join(names)}")
    return int(bool(broken))
