"""Memory and the others' streams while many readers of the gateway stop reading.

Tokenizer, router and gateway with their default flags, before a backend that emits a token of each stream every
--step-seconds, as an engine does (0: as fast as it is read, so that each further stream takes its share of the
processor, read or not). Some callers read streams of chat completions to their ends, one after the other: alone for
--seconds, then beside --stopped others that read as they do, then beside as many that open a stream, read its head and
never read again. Told: the callers' tokens a second, the time to their first token, what gateway and router take more,
and how many of the stopped were cut off by the end.

    python benchmarks/stopped_readers.py --stopped 256 --seconds 30
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in (".", "services", "tests")]
from factories.servers import stack

from benchmarks._arguments import at_least
from benchmarks._processes import ending_with_us, stop_on_sigterm
from benchmarks._report import Table, percentile
from benchmarks._wire_stack import memory_mb

# Tokens of an answer that is read, and of one that nobody reads: far more than any buffer holds.
_READ_TOKENS, _ENDLESS_TOKENS = 256, 200_000
_LOOK_SECONDS = 0.5


@dataclass
class Seen:
    """Tokens and times that the callers saw, and the processes' largest memory."""

    tokens: int = 0
    first_seconds: list[float] = field(default_factory=list)
    gateway_mb: float = 0.0
    router_mb: float = 0.0


def request_of(tokens: int) -> bytes:
    """A streamed chat of so many tokens, as HTTP/1.1."""
    asked = {"messages": [{"role": "user", "content": "Go on."}], "stream": True, "max_tokens": tokens}
    body = json.dumps({**asked, "ignore_eos": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def read_streams(address: tuple[str, int], until: float, seen: Seen) -> None:
    """Read one stream after the other on one connection."""
    reader, writer = await asyncio.open_connection(*address)
    asked = request_of(_READ_TOKENS)
    while time.monotonic() < until:
        begin = time.monotonic()
        writer.write(asked)
        first = True
        while True:
            line = await reader.readline()
            if not line:
                raise SystemExit("the gateway closed a connection that reads")
            if b'"content":"' in line and b'"content":""' not in line:
                if first:
                    seen.first_seconds.append(time.monotonic() - begin)
                    first = False
                seen.tokens += 1
            elif line == b"0\r\n":
                await reader.readline()
                break
    writer.close()


async def open_endless(address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a stream that outlasts every phase, and read no more than its head's first line."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request_of(_ENDLESS_TOKENS))
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"an endless stream was refused: {status!r}")
    return reader, writer


async def swallow(reader: asyncio.StreamReader) -> None:
    """Read whatever comes."""
    while await reader.read(1 << 16):
        pass


async def watch(pids: dict[str, int], until: float, seen: Seen) -> None:
    """Note the largest memory of both processes."""
    while time.monotonic() < until:
        seen.gateway_mb = max(seen.gateway_mb, memory_mb(pids["gateway"]))
        seen.router_mb = max(seen.router_mb, memory_mb(pids["router"]))
        await asyncio.sleep(_LOOK_SECONDS)


async def phase(address: tuple[str, int], pids: dict[str, int], callers: int, seconds: float) -> Seen:
    """Let callers read for a while."""
    seen, until = Seen(), time.monotonic() + seconds
    await asyncio.gather(watch(pids, until, seen), *(read_streams(address, until, seen) for _ in range(callers)))
    return seen


def row(name: str, seen: Seen, seconds: float, cut: str) -> list[Any]:
    """A line of the table."""
    firsts = [1000 * one for one in seen.first_seconds]
    return [
        name,
        f"{seen.tokens / seconds:.0f}",
        f"{percentile(firsts, 0.5):.1f}",
        f"{percentile(firsts, 0.99):.1f}",
        f"{seen.gateway_mb:.0f}",
        f"{seen.router_mb:.0f}",
        cut,
    ]


async def run(arguments: argparse.Namespace, address: tuple[str, int], pids: dict[str, int]) -> None:
    """All phases, in turn."""
    header = ("callers", "tok/s", "first token p50 ms", "p99 ms", "gateway MB", "router MB", "stopped, cut off")
    table = Table(header, None)
    await phase(address, pids, arguments.callers, arguments.seconds / 4)
    alone = await phase(address, pids, arguments.callers, arguments.seconds)
    table.row(*row("alone", alone, arguments.seconds, "–"))
    others = await asyncio.gather(*(open_endless(address) for _ in range(arguments.stopped)))
    readings = [asyncio.ensure_future(swallow(reader)) for reader, _ in others]
    beside = await phase(address, pids, arguments.callers, arguments.seconds)
    table.row(*row(f"beside {arguments.stopped} that read", beside, arguments.seconds, "–"))
    for reading in readings:
        reading.cancel()
    for _, writer in others:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
    beside = await phase(address, pids, arguments.callers, arguments.seconds)
    cut = sum(writer.is_closing() for _, writer in others)
    table.row(*row(f"beside the {arguments.stopped}, stopped", beside, arguments.seconds, str(cut)))
    for _, writer in others:
        writer.transport.abort()
    after = await phase(address, pids, arguments.callers, arguments.seconds)
    table.row(*row("after they left", after, arguments.seconds, "–"))


def main() -> None:
    """Start the processes, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stopped", type=at_least(1), default=256)
    parser.add_argument("--callers", type=at_least(1), default=4)
    parser.add_argument("--seconds", type=at_least(1), default=30)
    parser.add_argument("--step-seconds", type=float, default=0.05)
    arguments = parser.parse_args()
    stop_on_sigterm()
    with contextlib.ExitStack() as exits:
        tokenizer = exits.enter_context(_ending(stack.start("tokenizer")))
        tokenizer.wait_ready()
        port = stack.free_port()
        flags = ["--port", str(port), "--tokens", str(_ENDLESS_TOKENS), "--transport", "asyncio"]
        flags += ["--step-seconds", str(arguments.step_seconds)]
        command = ending_with_us(sys.executable, "-m", "factories.servers.emitting_backend", *flags)
        backend = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        exits.callback(backend.wait)
        exits.callback(backend.kill)
        where = ("--tokenizer", tokenizer.address, "--backend", f"127.0.0.1:{port}")
        router = exits.enter_context(_ending(stack.start("router", *where)))
        router.wait_ready()
        gateway = exits.enter_context(_ending(stack.start("gateway", "--router", router.address)))
        _wait_listening(gateway)
        pids = {"gateway": gateway.popen.pid, "router": router.popen.pid}
        asyncio.run(run(arguments, ("127.0.0.1", gateway.port), pids))


@contextlib.contextmanager
def _ending(process: stack.Process) -> Any:
    try:
        yield process
    finally:
        process.kill()


def _wait_listening(gateway: stack.Process) -> None:
    while "READY" not in gateway.output():
        if gateway.popen.poll() is not None:
            raise SystemExit(gateway.output())
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    main()
