"""Router, tokenizer and two backends for a long time under clients that do everything clients do.

    python tools/soak.py --minutes 40 --transport asyncio --out soak.json

Streams that are read, slowly read, not read, cancelled, late, stopped and refused, connections that are cut and bytes
that are no HTTP/2, while backends are killed, stopped and restarted. Every answer must be the one that the backends
give, whole, however often it was moved. Every `--period` seconds the clients pause, and what the router and the
tokenizer hold must be what they held after the first period: connections, streams, tasks and file descriptors exactly,
memory up to `--allowed-mb`. In the end the router is sent SIGTERM amid streams, which must still be answered.

Exits with 1 and says why when anything was otherwise. One backend serves by grpc.aio, one by Penstock's own HTTP/2;
`--program` adds clients in other languages (tests/clients) and `--command` what prints one answer (clients/node), which
are run over and over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT / part) for part in ("tools", "services", "tests")]
from _soak_clients import PATIENCE, Clients, chat
from factories.servers import stack
from factories.servers.emitting_backend import count_up
from penstock.v1 import common_pb2, text_pb2, tokenizer_pb2, tokenizer_pb2_grpc

TOKENS = 64
# Held exactly as after the first period.
_EXACT = ("fds", "threads", "tasks", "Call", "Connection", "StreamCall", "CallsConnection")
_BACKENDS = ("grpc", "asyncio")
# What a client of tests/clients may say: the backends here do not score.
_STATUSES = {"chat": {0}, "cancel": {1}, "deadline": {4}, "error": {3}, "score": {12}, "many": {12}}


class Backends:
    """Killed and restarted on the ports they began with."""

    def __init__(self, fingerprint: str, step_seconds: float) -> None:
        self.ports = [stack.free_port() for _ in _BACKENDS]
        self.events: Counter[str] = Counter()
        self._flags = ["--fingerprint", fingerprint, "--tokens", str(TOKENS), "--step-seconds", str(step_seconds)]
        self._processes = [self._start(place) for place in range(len(_BACKENDS))]

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(_ROOT / part) for part in ("services", "tests"))}
        flags = ["--port", str(self.ports[place]), "--transport", _BACKENDS[place], *self._flags]
        command = [sys.executable, "-m", "factories.servers.emitting_backend", *flags]
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    async def disturb(self, rng: random.Random) -> None:
        """One of them is lost, or stands still for a while."""
        place = rng.randrange(len(_BACKENDS))
        process = self._processes[place]
        what = rng.choices(("killed", "terminated", "stopped"), (5, 3, 2))[0]
        self.events[what] += 1
        if what == "stopped":
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(rng.random() * 4)
            process.send_signal(signal.SIGCONT)
            return
        process.send_signal(signal.SIGKILL if what == "killed" else signal.SIGTERM)
        await asyncio.to_thread(process.wait)
        await asyncio.sleep(rng.random() * 3)
        self._processes[place] = self._start(place)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class Services:
    """Tokenizer and router, which say what they hold."""

    def __init__(self, transport: str, flags: list[str], folder: Path, exits: contextlib.ExitStack) -> None:
        self._transport, self._flags, self._folder, self._exits = transport, flags, folder, exits
        self.processes: dict[str, stack.Process] = {}

    def start(self, role: str, *flags: str) -> stack.Process:
        """Ready."""
        program = (str(_ROOT / "tools" / "_soak_probe.py"), str(self._folder / f"{role}.json"))
        environment = {"PYTHONPATH": os.pathsep.join(str(_ROOT / part) for part in ("services", "clients/python"))}
        given = ("--transport", self._transport, *flags, *self._flags)
        process = stack.start(role, *given, environment=environment, program=program)
        self._exits.callback(process.log.unlink, missing_ok=True)
        self._exits.callback(process.kill)
        process.wait_ready()
        self.processes[role] = process
        return process

    async def held(self, role: str) -> dict[str, Any]:
        """Its snapshot of now."""
        out = self._folder / f"{role}.json"
        out.unlink(missing_ok=True)
        self.processes[role].popen.send_signal(signal.SIGUSR1)
        async with asyncio.timeout(PATIENCE):
            while not out.exists():
                await asyncio.sleep(0.1)
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    async def at_rest(self, role: str, like: dict[str, Any] | None) -> dict[str, Any]:
        """Its snapshot once it holds what it held before (`like`), or the same twice; what it holds after a while."""
        found = await self.held(role)
        for _ in range(60):
            await asyncio.sleep(1)
            before, found = found, await self.held(role)
            if all(found.get(kind) == (like or before).get(kind) for kind in _EXACT):
                break
        return found


def ready_backends(router: stack.Process) -> float:
    """Number of backends that the router counts as ready."""
    text = urllib.request.urlopen(f"http://{router.metrics_address}/metrics", timeout=PATIENCE).read().decode()
    found: list[str] = re.findall(r"^penstock_router_backend_up\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


async def expected_text(tokenizer: str) -> tuple[str, str]:
    """Text that every answer has, and the tokenizer's fingerprint."""
    async with grpc.aio.insecure_channel(tokenizer) as channel:
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        info = await stub.GetTokenizer(tokenizer_pb2.GetTokenizerRequest())
        nothing: Any = None
        request = tokenizer_pb2.DecodeRequest(sequences=[common_pb2.TokenIds(ids=count_up(TOKENS)(nothing))])
        return (await stub.Decode(request)).texts[0], info.tokenizer_fingerprint


class Soak:
    """One run."""

    def __init__(self, arguments: argparse.Namespace, services: Services, backends: Backends, clients: Clients) -> None:
        self._arguments = arguments
        self._services, self._backends, self._clients = services, backends, clients
        self._rng = random.Random(arguments.seed)
        self.samples: list[dict[str, Any]] = []
        self.program_runs = 0
        self._begin = time.monotonic()

    async def run(self) -> None:
        """Until the time is over; two periods at least, since the last is held to the first."""
        for number, folder in enumerate(self._folders()):
            folder.mkdir()
            long, bad = chat(), text_pb2.ChatRequest()
            score = text_pb2.ScoreTextRequest()
            score.items.add(prompt="The capital of France is", continuation=" Paris")
            for name, request in {"chat": chat(), "long": long, "bad": bad, "score": score}.items():
                (folder / name).write_bytes(request.SerializeToString())
            print(f"client {number}: {self._arguments.program[number]}")
        while len(self.samples) < 2 or time.monotonic() - self._begin < 60 * self._arguments.minutes:
            await self._period()

    def _folders(self) -> list[Path]:
        return [Path(self._arguments.folder) / f"client-{place}" for place in range(len(self._arguments.program))]

    async def _period(self) -> None:
        over = asyncio.Event()
        working = [asyncio.ensure_future(self._clients.work(over)) for _ in range(self._arguments.clients)]
        working.append(asyncio.ensure_future(self._disturb(over)))
        commands = zip(self._arguments.program, self._folders(), strict=True)
        working += [asyncio.ensure_future(self._run_program(over, *one)) for one in commands]
        working += [asyncio.ensure_future(self._run_command(over, one)) for one in self._arguments.command]
        await asyncio.sleep(self._arguments.period)
        over.set()
        await asyncio.gather(*working)
        await self._clients.close()
        # A channel of grpc.aio keeps its connection until its last call is gone.
        gc.collect()
        await self._until_ready()
        await self._sample()

    async def _until_ready(self) -> None:
        """All backends, for the router."""
        while ready_backends(self._services.processes["router"]) < len(_BACKENDS):
            await asyncio.sleep(0.5)

    async def _disturb(self, over: asyncio.Event) -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rng.uniform(10, 25)):
                    await over.wait()
            if not over.is_set():
                await self._backends.disturb(self._rng)
                await self._until_ready()

    async def _run_program(self, over: asyncio.Event, command: str, folder: Path) -> None:
        while not over.is_set():
            given = [*shlex.split(command), self._clients.address, str(folder)]
            process = await asyncio.create_subprocess_exec(*given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            out, _ = await process.communicate()
            self.program_runs += 1
            lines = dict(line.split() for line in out.decode().splitlines() if line.count(" ") == 1)
            if process.returncode or any(int(lines.get(name, -1)) not in may for name, may in _STATUSES.items()):
                self._clients.wrong.append(f"{command}: {out.decode()[-300:]}")

    async def _run_command(self, over: asyncio.Event, command: str) -> None:
        while not over.is_set():
            given = shlex.split(command.format(address=self._clients.address))
            process = await asyncio.create_subprocess_exec(*given, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            out, errors = await process.communicate()
            self.program_runs += 1
            if process.returncode or self._clients.text.strip() not in out.decode():
                self._clients.wrong.append(f"{command}: {out.decode()[-300:]} {errors.decode()[-300:]}")

    async def _sample(self) -> None:
        first = self.samples[0] if self.samples else {}
        sample: dict[str, Any] = {"minutes": round((time.monotonic() - self._begin) / 60, 1)}
        for role in self._services.processes:
            sample[role] = await self._services.at_rest(role, first.get(role))
        self.samples.append(sample)
        wrong = len(self._clients.wrong)
        print(json.dumps({**sample, "calls": self._clients.done.total(), "wrong": wrong}), flush=True)
        for line in self._clients.wrong[:5]:
            print(line, flush=True)

    async def drain(self) -> None:
        """The router is sent SIGTERM amid streams."""
        over, before = asyncio.Event(), len(self._clients.wrong)
        over.set()
        calls = [asyncio.ensure_future(self._clients.slow()) for _ in range(16)]
        await asyncio.sleep(1)
        code = await asyncio.to_thread(self._services.processes["router"].terminate)
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            if ended is not None:
                self._clients.wrong.append(f"drain: {ended!r}")
        await self._clients.close()
        if code:
            self._clients.wrong.append(f"the router ended with {code}")
        print(f"drained with {len(self._clients.wrong) - before} wrong", flush=True)

    def leaks(self) -> list[str]:
        """Resources held in the end that were not held after the first period."""
        first, last, found = self.samples[0], self.samples[-1], []
        for role in self._services.processes:
            found += [
                f"{role}: {kind} {first[role].get(kind, 0)} to {last[role].get(kind, 0)}"
                for kind in _EXACT
                if first[role].get(kind) != last[role].get(kind)
            ]
            more = last[role]["trimmed_mb"] - first[role]["trimmed_mb"]
            if more > self._arguments.allowed_mb:
                found.append(f"{role}: {more:.1f} MB more than after the first period")
        return found


async def run(arguments: argparse.Namespace, exits: contextlib.ExitStack) -> int:
    """The exit code."""
    arguments.folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-soak-"))
    services = Services(arguments.transport, shlex.split(arguments.flags), Path(arguments.folder), exits)
    tokenizer = services.start("tokenizer")
    text, fingerprint = await expected_text(tokenizer.address)
    backends = Backends(fingerprint, arguments.step_seconds)
    exits.callback(backends.kill)
    for port in backends.ports:
        stack.wait_serving(f"127.0.0.1:{port}")
    where = [flag for port in backends.ports for flag in ("--backend", f"127.0.0.1:{port}")]
    router = services.start("router", "--tokenizer", tokenizer.address, *where)
    clients = Clients(router.address, text, random.Random(arguments.seed))
    soak = Soak(arguments, services, backends, clients)
    await soak.run()
    await soak.drain()
    leaks = soak.leaks()
    report = {
        "transport": arguments.transport,
        "calls": dict(clients.done),
        "program_runs": soak.program_runs,
        "backends": dict(backends.events),
        "wrong": clients.wrong,
        "leaks": leaks,
        "samples": soak.samples,
    }
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(report, indent=1))
    print(f"{clients.done.total()} calls, {soak.program_runs} runs of other clients, {dict(backends.events)}")
    for line in [*clients.wrong[:50], *leaks]:
        print(line)
    return 1 if clients.wrong or leaks else 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--period", type=float, default=240.0, help="seconds between checks of held resources")
    parser.add_argument("--transport", choices=("grpc", "asyncio"), default="asyncio")
    parser.add_argument("--flags", default="", help="more flags of both services")
    parser.add_argument("--clients", type=int, default=24, help="calls at once")
    parser.add_argument("--step-seconds", type=float, default=0.02, help="seconds between the tokens of an answer")
    parser.add_argument("--allowed-mb", type=float, default=8.0)
    parser.add_argument("--program", action="append", default=[], help="a built client of tests/clients")
    parser.add_argument(
        "--command", action="append", default=[], help="a command that prints one answer; {address} is the router's"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="file for the results")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as exits:
        return asyncio.run(run(arguments, exits))


if __name__ == "__main__":
    sys.exit(main())
