"""A batch of 1,000 lines beside interactive calls: what they wait for it, and that kill -9 loses and doubles no line.

    python -m benchmarks batch_beside [--rounds 6] [--seconds 20] [--rate 4] [--paced "0.01 0.0005"] [--no-kills]

Real processes: generation, tokenizer, router and gateway, on the demo model or one of `--model`. Interactive calls are
streamed chats over HTTP, an open loop with the same arrivals in every round: alone and beside a batch in turn, so that
both have the same of what else the machine does. Then one batch of `--lines`, with the calls going on, in which each of
the four processes is killed once and started again.

With --paced, steps sleep in place of the model ("FIXED PER_ROW" seconds): the result is then the same on any machine,
however crowded.

Targets: p99 of the first token and of the whole call beside the batch at most 1.2 times that without; each line has
one answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._report import Report, percentile

ROOT = Path(__file__).resolve().parents[1]

from factories.servers import stack

_ENVIRONMENT = {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT / "services")), "PENSTOCK_TUNE_SECONDS": "1.5"}
_URL = "/v1/completions"
_TARGET = 1.2
_LOOK_SECONDS = 0.2
_COLUMNS = ("calls", "number", "failed", "first token p50 ms", "p99 ms", "whole call p50 ms", "p99 ms", "lines/s")
_ROLES = ("generation", "tokenizer", "router", "gateway")


@dataclass
class Calls:
    """Interactive calls of one kind: milliseconds to the first token and to the end, and failures."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    failed: int = 0
    lines: int = 0
    seconds: float = 0.0

    def row(self, name: str) -> list[object]:
        """Return its row of the table."""
        cells: list[object] = [name, len(self.whole), self.failed]
        for values in (self.first, self.whole):
            cells += [f"{percentile(values, share):.1f}" for share in (0.5, 0.99)]
        return [*cells, f"{self.lines / self.seconds:.1f}" if self.lines else "–"]


class Services:
    """The four processes, on ports that they keep when they are started again."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, exits: contextlib.ExitStack) -> None:
        self._arguments, self._folder, self._exits = arguments, folder, exits
        self._processes: dict[str, stack.Process] = {}
        for role in _ROLES:
            self.start(role)

    @property
    def host_port(self) -> tuple[str, int]:
        """Address of the gateway."""
        return "127.0.0.1", self._processes["gateway"].port

    def start(self, role: str) -> None:
        """Start a process, on its port of before; return when it is ready."""
        flags, settings = self._flags(role), {"environment": _ENVIRONMENT}
        if role == "generation" and self._arguments.paced:
            settings["environment"] = _ENVIRONMENT | {"PACED_STEP": self._arguments.paced}
            settings["program"] = (str(ROOT / "benchmarks" / "_paced_generation.py"),)  # type: ignore[assignment]
        before = self._processes.get(role)
        if before is not None:
            flags += ["--port", str(before.port)]
        process = stack.start(role, *flags, **settings)  # type: ignore[arg-type]
        if before is not None:
            process = dataclasses.replace(process, port=before.port)
        self._processes[role] = process
        self._exits.callback(process.kill)
        if role != "gateway":
            process.wait_ready()
            return
        while process.popen.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.base + "/health", timeout=5):
                return
            time.sleep(_LOOK_SECONDS)
        raise RuntimeError(process.output())

    def kill(self, role: str) -> None:
        """Kill a process at once."""
        self._processes[role].kill()

    @property
    def base(self) -> str:
        """URL of the gateway."""
        return "http://{}:{}".format(*self.host_port)

    def _flags(self, role: str) -> list[str]:
        if role == "generation":
            return [self._arguments.model] if self._arguments.model else []
        if role == "tokenizer":
            return [self._arguments.model] if self._arguments.model else []
        if role == "router":
            backend, tokenizer = (self._processes[one].address for one in ("generation", "tokenizer"))
            return ["--backend", backend, "--tokenizer", tokenizer]
        store = str(self._folder / "jobs")
        return ["--router", self._processes["router"].address, "--job-store", store]


class Batches:
    """Calls to /v1/files and /v1/batches."""

    def __init__(self, services: Services, arguments: argparse.Namespace) -> None:
        self._services, self._arguments = services, arguments

    def submit(self, lines: int) -> str:
        """Make a batch of `lines`, and return its id."""
        body = {"max_tokens": self._arguments.line_tokens, "temperature": 0}
        asked = [
            {"custom_id": str(one), "method": "POST", "url": _URL, "body": {"prompt": f"River {one} runs", **body}}
            for one in range(lines)
        ]
        data = b"".join(json.dumps(one).encode() + b"\n" for one in asked)
        parts = (
            b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
            b'content-disposition: form-data; name="file"; filename="lines"\r\n\r\n' + data + b"\r\n--x--\r\n"
        )
        file = self._json("/v1/files", parts, "multipart/form-data; boundary=x")
        batch = {"input_file_id": file["id"], "endpoint": _URL, "completion_window": "24h"}
        return str(self._json("/v1/batches", json.dumps(batch).encode())["id"])

    def get(self, batch: str) -> dict[str, Any]:
        """Return a batch; while the gateway is away, one without answers."""
        try:
            return self._json(f"/v1/batches/{batch}")
        except OSError:
            return {"status": "unknown", "request_counts": {"completed": -1, "failed": 0}}

    def done(self, batch: str) -> int:
        """Return the number of lines with an answer."""
        return int(self.get(batch)["request_counts"]["completed"])

    def until_done(self, batch: str, lines: int) -> int:
        """Wait until a batch has this number of answers; return their number."""
        while (done := self.done(batch)) < lines:
            time.sleep(_LOOK_SECONDS)
        return done

    def until_ended(self, batch: str) -> dict[str, Any]:
        """Wait for a batch's end; return it."""
        while (ended := self.get(batch))["status"] in ("unknown", "validating", "in_progress", "cancelling"):
            time.sleep(_LOOK_SECONDS)
        return ended

    def cancel(self, batch: str) -> None:
        """Cancel a batch that is not at its end."""
        with contextlib.suppress(urllib.error.HTTPError):
            self._json(f"/v1/batches/{batch}/cancel", b"")

    def answers(self, file_id: str) -> list[str]:
        """Return the ids of a file of answers."""
        with urllib.request.urlopen(f"{self._services.base}/v1/files/{file_id}/content") as answer:
            return [json.loads(line)["custom_id"] for line in answer]

    def _json(self, path: str, body: bytes | None = None, kind: str = "application/json") -> dict[str, Any]:
        asked = urllib.request.Request(self._services.base + path, body, {"content-type": kind})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


async def call(host_port: tuple[str, int], tokens: int, calls: Calls) -> None:
    """Make one streamed chat, and note its times."""
    body = {"messages": [{"role": "user", "content": "Tell me about rivers"}], "max_tokens": tokens, "stream": True}
    sent = json.dumps({**body, "temperature": 0}).encode()
    begin = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(*host_port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(sent) + sent
        )
        read, first = b"", 0.0
        while part := await reader.read(65536):
            read += part
            if not first and b'"content":"' in read.replace(b'"content":""', b""):
                first = time.perf_counter()
        writer.close()
        if b"[DONE]" not in read or not first:
            raise ConnectionError
    except OSError:
        calls.failed += 1
        return
    calls.first.append(1000 * (first - begin))
    calls.whole.append(1000 * (time.perf_counter() - begin))


async def load(services: Services, arguments: argparse.Namespace, calls: Calls, until: Callable[[float], bool]) -> None:
    """Make calls at random moments, the same for every round, while `until` is false of the seconds since the start."""
    moments, running = random.Random(7), set[asyncio.Task[None]]()
    begin, at = time.perf_counter(), 0.0
    while not until(at):
        at += moments.expovariate(arguments.rate)
        await asyncio.sleep(max(begin + at - time.perf_counter(), 0.0))
        running.add(asyncio.create_task(call(services.host_port, arguments.tokens, calls)))
    await asyncio.gather(*running)


async def rounds(services: Services, batches: Batches, arguments: argparse.Namespace) -> tuple[Calls, Calls]:
    """Measure calls alone and beside a batch, in turn."""
    alone, beside = Calls(), Calls()

    def over(at: float) -> bool:
        return at >= arguments.seconds

    await load(services, arguments, Calls(), lambda at: at >= min(arguments.seconds, 5.0))
    for _ in range(arguments.rounds):
        await load(services, arguments, alone, over)
        batch = await asyncio.to_thread(batches.submit, arguments.lines)
        before, begin = await asyncio.to_thread(batches.until_done, batch, 1), time.perf_counter()
        await load(services, arguments, beside, over)
        beside.lines += await asyncio.to_thread(batches.done, batch) - before
        beside.seconds += time.perf_counter() - begin
        await asyncio.to_thread(batches.cancel, batch)
        await asyncio.to_thread(batches.until_ended, batch)
    return alone, beside


async def killed(services: Services, batches: Batches, arguments: argparse.Namespace) -> dict[str, Any]:
    """Kill each process once during a batch, with calls going on; return what became of its lines."""
    batch, calls, is_over = await asyncio.to_thread(batches.submit, arguments.lines), Calls(), False
    going_on = asyncio.create_task(load(services, arguments, calls, lambda _: is_over))
    begin, kills = time.perf_counter(), []
    for number, role in enumerate(_ROLES, 1):
        done = await asyncio.to_thread(batches.until_done, batch, number * arguments.lines // 6)
        services.kill(role)
        kills.append({"role": role, "lines": done})
        await asyncio.to_thread(services.start, role)
    ended = await asyncio.to_thread(batches.until_ended, batch)
    seconds, is_over = time.perf_counter() - begin, True
    await going_on
    ids = [one for name in ("output_file_id", "error_file_id") if ended[name] for one in batches.answers(ended[name])]
    return {
        "status": ended["status"],
        "request_counts": ended["request_counts"],
        "seconds": round(seconds, 1),
        "kills": kills,
        "every_line_once": sorted(ids, key=int) == [str(one) for one in range(arguments.lines)],
        "interactive": {"ended": len(calls.whole), "failed": calls.failed},
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's flags."""
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each kind (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of one round (default %(default)s)")
    parser.add_argument("--rate", type=float, default=4.0, help="interactive calls a second (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="of an interactive answer (default %(default)s)")
    parser.add_argument("--lines", type=int, default=1000, help="of a batch (default %(default)s)")
    parser.add_argument("--line-tokens", type=int, default=16, help="of a line's answer (default %(default)s)")
    parser.add_argument(
        "--kills", action=argparse.BooleanOptionalAction, default=True, help="kill each process during a batch at last"
    )
    parser.add_argument("--model", help="in place of the demo model")
    parser.add_argument("--paced", metavar="'FIXED PER_ROW'", help="seconds of a step that sleeps, and of each row")


def main(options: argparse.Namespace, report: Report) -> int:
    """Run it; the status is 1 where a target is missed."""
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-batch-")))
        services = Services(options, folder, exits)
        batches = Batches(services, options)
        alone, beside = asyncio.run(rounds(services, batches, options))
        table = report.table(_COLUMNS)
        table.row(*alone.row("alone"))
        table.row(*beside.row("beside a batch"))
        ratios = {
            name: percentile(getattr(beside, name), share) / percentile(getattr(alone, name), share)
            for name in ("first", "whole")
            for share in (0.99,)
        }
        table.line(f"\np99 beside / alone: first token {ratios['first']:.2f}, whole call {ratios['whole']:.2f}")
        found = asyncio.run(killed(services, batches, options)) if options.kills else None
        if found:
            table.line(f"after four kills: {json.dumps(found)}")
    results = {"alone": dataclasses.asdict(alone), "beside": dataclasses.asdict(beside), "ratios": ratios}
    report.save({**results, "killed": found, "options": report.settings, "load": os.getloadavg()})
    return 0 if max(ratios.values()) <= _TARGET and (found is None or found["every_line_once"]) else 1
