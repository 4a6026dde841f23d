"""The processor time and the function calls that a request costs the HTTP gateway and the router behind it.

    python -m benchmarks gateway_requests
    python -m benchmarks gateway_requests --tree /path/to/another/checkout --tokens 16 --cycles 5
    python -m benchmarks gateway_requests --tree /path/to/another/checkout --instructions

Gateway, router and tokenizer are processes of `--tree`; the backend, which emits without a model, and the only client
are this process. Requests come one after the other on one connection that is kept. A streamed answer gets its next
token when the client has the one before, and a whole answer has all of them in one step, so that no two runs differ in
the number of tokens that are read at once. A turn is a round of one cell.

Processor time is what the kernel counts for all threads of a process (/proc/PID/task/TID/schedstat), µs a request.
Calls are those of Python and C in the main thread of a second gateway and router. They are the same in each run,
however busy the machine is, but for what is done by the clock. So are instructions in user mode, which see what a call
costs, too; what the kernel does for a process is not among them. The processor time of two trees differs by some
percent from one start of their processes to the next, wherever their memory happens to lie; instructions by less than
one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from factories.servers import stack
from factories.servers.emitting_backend import EmittingBackend

from benchmarks import _callgrind, _counted_program
from benchmarks._arguments import at_least
from benchmarks._callgrind import Callgrind
from benchmarks._report import Report
from benchmarks._wire_stack import Answer, make_answer, wait_ready

_ROOT = Path(__file__).resolve().parents[1]
_PROGRAM = ("-m", "penstock.cli.main")
ROUTES = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
FORMS = ("streamed", "whole")
PARTS = ("gateway", "router")
# Of the counted processes: the first ones make what is kept from then on.
_FIRST_REQUESTS, _COUNTED_REQUESTS = 4, 7
# Tokens of the answers of a turn under callgrind.
_SLOW_TOKENS = 1000


@dataclass(frozen=True)
class Cell:
    """Kind of request."""

    route: str
    form: str
    tokens: int

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"{self.route} {self.form} {self.tokens}"

    def request(self, address: str) -> bytes:
        """Bytes of it."""
        text = "Tell me about Penstock."
        asked = {"prompt": text} if self.route == "completion" else {"messages": [{"role": "user", "content": text}]}
        fields = {"model": "penstock-demo", **asked, "max_tokens": self.tokens, "stream": self.form == "streamed"}
        body = json.dumps(fields).encode()
        head = f"POST {ROUTES[self.route]} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
        more = f"accept: application/json\r\nuser-agent: benchmark\r\ncontent-length: {len(body)}\r\n\r\n"
        return (head + more).encode() + body


@dataclass(frozen=True)
class Pair:
    """A gateway before a router of its own. `calls`: files of their counters by part, and `instructions`: their other
    counters; none where nothing is counted."""

    address: str
    pids: dict[str, int]
    calls: dict[str, Path] = field(default_factory=dict)
    instructions: dict[str, Callgrind] = field(default_factory=dict)

    def spent(self) -> dict[str, float]:
        """Processor time of each part so far, seconds."""
        return {part: cpu_seconds(pid) for part, pid in self.pids.items()}

    def called(self) -> dict[str, int]:
        """Calls of each part so far."""
        return {part: int.from_bytes(path.read_bytes(), "little") for part, path in self.calls.items()}


def cpu_seconds(pid: int) -> float:
    """Processor time of a process's threads, to the nanosecond; that of threads that have ended is not in it."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


class Client:
    """One connection to a gateway, which is kept."""

    def __init__(self, address: str, backend: EmittingBackend, answer: Answer) -> None:
        self._address, self._backend, self._answer = address, backend, answer

    async def __aenter__(self) -> Client:
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, cell: Cell) -> None:
        """Send a request and read its answer. Raises SystemExit for any other answer than the backend's."""
        is_streamed = cell.form == "streamed"
        self._backend.tokens_per_step = 1 if is_streamed else cell.tokens
        self._backend.allowance = 0
        await self._backend.allow(1)
        self._writer.write(cell.request(self._address))
        head = await self._reader.readuntil(b"\r\n\r\n")
        body = await (self._pieces() if is_streamed else self._reader.readexactly(_length(head)))
        if not head.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"{cell.name}: {(head + body).decode(errors='replace')}")
        if text_of(cell, body) != self._answer.text[: cell.tokens * 4]:
            raise SystemExit(f"{cell.name}: other text than the backend sent")

    async def _pieces(self) -> bytes:
        """Read a chunked body; the backend may take a step for each chunk."""
        body = b""
        while size := int(await self._reader.readline(), 16):
            body += await self._reader.readexactly(size)
            await self._reader.readexactly(2)
            await self._backend.allow(1)
        await self._reader.readline()
        return body


def _length(head: bytes) -> int:
    return int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])


def text_of(cell: Cell, body: bytes) -> str:
    """Text of an answer."""
    if cell.form == "whole":
        choices = json.loads(body)["choices"]
    else:
        events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n")]
        choices = [choice for one in events if one.startswith(b"{") for choice in json.loads(one)["choices"]]
    if cell.route == "completion":
        return "".join(choice["text"] for choice in choices)
    return "".join((choice.get("message") or choice["delta"]).get("content") or "" for choice in choices)


class Bench:
    """The running processes, and rounds of requests."""

    def __init__(self, tree: Path, most_tokens: int, exits: contextlib.ExitStack) -> None:
        self._exits = exits
        path = os.pathsep.join(str(tree / part) for part in ("services", "clients/python", "."))
        self._environment = {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        self._folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-requests-")))
        self._tokenizer = self._start("tokenizer")
        self._tokenizer.wait_ready()
        self.answer = make_answer(self._tokenizer.address, most_tokens)
        self.backend = EmittingBackend(
            script=lambda _: self.answer.ids, vocab_size=0, fingerprint=self.answer.fingerprint
        )

    def _start(self, role: str, *flags: str, calls: Path | None = None, dumps: Path | None = None) -> stack.Process:
        more, program = {}, _PROGRAM
        if dumps is not None:
            more[_callgrind.VARIABLE] = str(dumps)
            program = (str(_ROOT / "benchmarks" / "_callgrind.py"),)
        if calls is not None:
            calls.write_bytes(bytes(8))
            # The counter is this tree's, whatever is counted.
            more[_counted_program.VARIABLE] = str(calls)
            program = (str(_ROOT / "benchmarks" / "_counted_program.py"),)
        process = stack.start(role, *flags, environment={**self._environment, **more}, program=program, forked=False)
        self._exits.callback(process.log.unlink, missing_ok=True)
        self._exits.callback(process.kill)
        return process

    async def pair(self, *, counted: bool = False, by_callgrind: bool = False) -> Pair:
        """Gateway and router, ready. The backend must listen."""
        calls = {part: self._folder / part for part in PARTS} if counted else {}
        dumps = {part: self._folder / f"{part}-dump" for part in PARTS} if by_callgrind else {}
        where = ("--tokenizer", self._tokenizer.address, "--backend", self.backend.address)
        router = self._start("router", *where, calls=calls.get("router"), dumps=dumps.get("router"))
        await asyncio.to_thread(router.wait_ready)
        gateway = self._start(
            "gateway", "--router", router.address, calls=calls.get("gateway"), dumps=dumps.get("gateway")
        )
        await asyncio.to_thread(wait_ready, gateway)
        pids = {"gateway": gateway.popen.pid, "router": router.popen.pid}
        return Pair(gateway.address, pids, calls, {part: Callgrind(pids[part], path) for part, path in dumps.items()})

    async def cpu(self, pair: Pair, cell: Cell, requests: int) -> dict[str, float]:
        """Microseconds of each part for a request."""
        async with Client(pair.address, self.backend, self.answer) as client:
            for _ in range(_FIRST_REQUESTS):
                await client.ask(cell)
            before = pair.spent()
            for _ in range(requests):
                await client.ask(cell)
            return {part: (spent - before[part]) / requests * 1e6 for part, spent in pair.spent().items()}

    async def calls(self, pair: Pair, cell: Cell) -> dict[str, int]:
        """Calls of each part for a request: the median of some."""
        found: dict[str, list[int]] = {part: [] for part in pair.calls}
        async with Client(pair.address, self.backend, self.answer) as client:
            for _ in range(_FIRST_REQUESTS):
                await client.ask(cell)
            before = pair.called()
            for _ in range(_COUNTED_REQUESTS):
                await client.ask(cell)
                after = pair.called()
                for part, values in found.items():
                    values.append(after[part] - before[part])
                before = after
        return {part: int(median(values)) for part, values in found.items()}

    async def instructions(self, pair: Pair, cell: Cell) -> dict[str, int]:
        """Instructions of each part for a request."""
        requests = max(3, _SLOW_TOKENS // cell.tokens)
        async with Client(pair.address, self.backend, self.answer) as client:
            for _ in range(_FIRST_REQUESTS):
                await client.ask(cell)
            for counter in pair.instructions.values():
                await counter.reset()
            for _ in range(requests):
                await client.ask(cell)
            return {part: await counter.taken() // requests for part, counter in pair.instructions.items()}


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Every kind of request that was asked for."""
    for tokens in options.tokens:
        for route in options.routes:
            for form in options.forms:
                yield Cell(route, form, tokens)


async def count_instructions(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    """A row for each turn."""
    _callgrind.check_installed()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as exits:
        bench = Bench(options.tree, max(options.tokens), exits)
        async with bench.backend:
            pair = await bench.pair(by_callgrind=True)
            async with Client(pair.address, bench.backend, bench.answer) as client:
                # Before the counters begin: what a process does once.
                for cell in cells(options):
                    for _ in range(_FIRST_REQUESTS):
                        await client.ask(cell)
            for counter in pair.instructions.values():
                await counter.begin()
            table = report.table(("request", *(f"{part}, thousand instructions" for part in PARTS)))
            for _ in range(options.cycles):
                for cell in cells(options):
                    found = await bench.instructions(pair, cell)
                    rows.append({"cell": cell.name, "instructions": found})
                    table.row(cell.name, *(f"{found[part] / 1000:.0f}" for part in PARTS))
    return rows


async def measure(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    """A row for each turn."""
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as exits:
        bench = Bench(options.tree, max(options.tokens), exits)
        async with bench.backend:
            plain, counted = await bench.pair(), await bench.pair(counted=True)
            table = report.table(("request", *(f"{part} µs" for part in PARTS), *(f"{part} calls" for part in PARTS)))
            for _ in range(options.cycles):
                for cell in cells(options):
                    calls = await bench.calls(counted, cell)
                    cpu = await bench.cpu(plain, cell, max(1, options.round_tokens // cell.tokens))
                    rows.append({"cell": cell.name, "cpu_us": cpu, "calls": calls})
                    table.row(cell.name, *(f"{cpu[part]:.0f}" for part in PARTS), *(calls[part] for part in PARTS))
    return rows


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--tree", type=Path, default=_ROOT, help="checkout that gateway, router and tokenizer are of")
    parser.add_argument("--tokens", type=at_least(1), nargs="+", default=[16, 128], help="tokens of an answer")
    parser.add_argument("--routes", choices=ROUTES, nargs="+", default=list(ROUTES))
    parser.add_argument("--forms", choices=FORMS, nargs="+", default=list(FORMS))
    parser.add_argument("--cycles", type=at_least(1), default=1, help="turns of each cell")
    parser.add_argument(
        "--instructions", action="store_true", help="count instructions under valgrind, in place of calls and time"
    )
    parser.add_argument("--round-tokens", type=at_least(1), default=3200, help="of a turn: it has as many requests")


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    work = count_instructions if options.instructions else measure
    report.save({"settings": report.settings, "rows": asyncio.run(work(options, report))})
