"""What the serving layer can carry: router, tokenizer and client around a backend that emits tokens at will.

Everything is a process of its own on this machine; the tokenizer and the router are the real ones. Two kinds of load:

* uncoalesced: a stream gets its next token when the client has received the one before (`--window`), so every token is
  a message of its own to a reader that keeps up, at any rate;
* coalesced: a stream may be `--coalesced-window` tokens ahead of the client, and the router merges what waits for a
  reader, as it does by default; `--interval 8` is a request with `stream_interval` 8.

The backend steps like an engine, at most every `--step-seconds`, with one message for all streams.

    python benchmarks/wire.py --out wire.json --plot wire.svg
    python benchmarks/wire.py --streams 64 256 --variant "two=--processes 2" --connections 8
    python benchmarks/wire.py --variant before=@/path/to/another/checkout

Variants take turns, round by round. A variant is `NAME=FLAGS` (flags of `penstock serve router`, and behind `//` of the
tokenizer) or `NAME=@DIR` (the services of another checkout); CPU time is that of a process and its children, from
/proc/PID/stat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import psutil

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT / part) for part in (".", "services", "tests")]
from factories import stack
from penstock.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

from benchmarks._report import write
from benchmarks._wire_profile import flamegraphs
from benchmarks._wire_report import markdown, plot

MODES = ("uncoalesced", "coalesced")
SLOTS = 4096
_TOKEN_CHARS = 4


@dataclass
class Variant:
    """A router and a tokenizer of their own, before each of the backends."""

    name: str
    tokenizer: stack.Process
    routers: dict[str, stack.Process]

    @property
    def processes(self) -> list[stack.Process]:
        return [self.tokenizer, *self.routers.values()]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children."""
    process = psutil.Process(pid)
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def memory_mb(pid: int) -> float:
    """RSS of a process and its children, MB of 10^6 bytes."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)]) / 1e6


def answer_ids(address: str, tokens: int) -> tuple[list[int], str]:
    """Ids whose text is four ASCII characters each, so that text tells how many tokens came; and the fingerprint."""
    with grpc.insecure_channel(address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        info = stub.GetTokenizer(tokenizer_pb2.GetTokenizerRequest())
        found: list[int] = []
        for begin in range(0, min(info.vocab_size, 8192), 256):
            ids = range(begin, min(begin + 256, info.vocab_size))
            request = tokenizer_pb2.DecodeRequest(sequences=[common_pb2.TokenIds(ids=[one]) for one in ids])
            texts = stub.Decode(request).texts
            found += [one for one, text in zip(ids, texts, strict=True) if len(text) == _TOKEN_CHARS and text.isascii()]
    if not found:
        raise SystemExit("the tokenizer has no token of four ASCII characters")
    return [found[place % len(found)] for place in range(tokens)], str(info.tokenizer_fingerprint)


class Bench:
    """The running processes."""

    def __init__(self, arguments: argparse.Namespace, exits: contextlib.ExitStack) -> None:
        self._arguments = arguments
        self._exits = exits
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-wire-")))
        self._counters = folder / "received"
        self._counters.write_bytes(bytes(8 * SLOTS))
        self.backends: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
        self._client = self._start_client()
        self.variants = [self._start_variant(text) for text in ["now=", *arguments.variant]]

    def _script(self, name: str, *flags: str, **settings: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(_ROOT / "benchmarks" / name), "--counters", str(self._counters), *flags]
        process = subprocess.Popen(command, **settings)
        self._exits.callback(process.wait)
        self._exits.callback(process.kill)
        return process

    def _start_client(self) -> subprocess.Popen[bytes]:
        return self._script(
            "_wire_client.py", "--token-chars", str(_TOKEN_CHARS), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def _start_backends(self, tokenizer: str) -> None:
        ids, fingerprint = answer_ids(tokenizer, self._arguments.tokens)
        for mode in MODES:
            port = stack.free_port()
            flags = ["--port", str(port), "--ids", json.dumps(ids), "--fingerprint", fingerprint]
            window = self._arguments.window if mode == "uncoalesced" else self._arguments.coalesced_window
            flags += ["--window", str(window), "--step-seconds", str(self._arguments.step_seconds)]
            if mode == "coalesced":
                flags += ["--interval", str(self._arguments.interval)]
            self.backends[mode] = (self._script("_wire_backend.py", *flags), f"127.0.0.1:{port}")

    def _start_variant(self, text: str) -> Variant:
        name, _, flags = text.partition("=")
        other = flags.removeprefix("@") if flags.startswith("@") else ""
        folder = Path(other) if other else _ROOT
        environment = {"PYTHONPATH": os.pathsep.join(str(folder / part) for part in ("services", "clients/python"))}
        flags, _, more = ("", "", "") if other else flags.partition("//")
        given = shlex.split(f"{self._arguments.tokenizer_flags} {more}")
        tokenizer = self._service("tokenizer", *given, environment=environment)
        if not self.backends:
            self._start_backends(tokenizer.address)
        routers = {
            mode: self._service(
                *("router", "--tokenizer", tokenizer.address, "--backend", backend),
                *shlex.split(flags),
                environment=environment,
            )
            for mode, (_, backend) in self.backends.items()
        }
        return Variant(name, tokenizer, routers)

    def _service(self, role: str, *flags: str, environment: dict[str, str]) -> stack.Process:
        process = stack.start(role, *flags, environment=environment)
        self._exits.callback(process.log.unlink, missing_ok=True)
        self._exits.callback(process.kill)
        process.wait_ready()
        return process

    def round(self, variant: Variant, mode: str, streams: int, requests: int) -> dict[str, Any]:
        """One round of load, with the processor time of everyone."""
        pids = {
            "router": variant.routers[mode].popen.pid,
            "tokenizer": variant.tokenizer.popen.pid,
            "backend": self.backends[mode][0].pid,
        }
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        task = {
            "address": variant.routers[mode].address,
            "streams": streams,
            "requests": requests,
            "connections": self._arguments.connections,
        }
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(json.dumps(task).encode() + b"\n")
        self._client.stdin.flush()
        result: dict[str, Any] = json.loads(self._client.stdout.readline())
        cpu = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        cpu["client"] = result.pop("cpu_seconds")
        result["cpu_us_per_token"] = {name: spent / result["tokens"] * 1e6 for name, spent in cpu.items()}
        result["rss_mb"] = {name: memory_mb(pids[name]) for name in ("router", "tokenizer")}
        return result


def profile(bench: Bench, folder: Path, mode: str, streams: int, requests: int) -> None:
    """Flame graphs of the processes of each variant under this load."""
    for variant in bench.variants:
        pids = {"router": variant.routers[mode].popen.pid, "tokenizer": variant.tokenizer.popen.pid}
        pids["backend"] = bench.backends[mode][0].pid
        with flamegraphs(folder, f"{variant.name}-{mode}-{streams}", pids) as seconds:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                bench.round(variant, mode, streams, requests)


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds of one variant, load and number of streams."""
    spent = [one["cpu_us_per_token"] for one in rounds]
    return {
        "tokens_per_second": median(one["tokens"] / one["seconds"] for one in rounds),
        "merged_share": 1 - sum(one["messages"] for one in rounds) / sum(one["tokens"] for one in rounds),
        "ttft_p50_ms": median(one["ttft"][0] for one in rounds) * 1e3,
        "ttft_p99_ms": median(one["ttft"][1] for one in rounds) * 1e3,
        "itl_p50_ms": median(one["itl"][0] for one in rounds) * 1e3,
        "itl_p90_ms": median(one["itl"][1] for one in rounds) * 1e3,
        "itl_p99_ms": median(one["itl"][2] for one in rounds) * 1e3,
        "cpu_us_per_token": {name: median(one[name] for one in spent) for name in spent[0]},
        "rss_mb": rounds[-1]["rss_mb"],
        "failed": sum(one["failed"] for one in rounds),
    }


def cells(arguments: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Every kind of load with every number of streams."""
    for mode in arguments.modes:
        for streams in arguments.streams:
            yield mode, streams


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per variant, load and number of streams."""
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as exits:
        bench = Bench(arguments, exits)
        for mode, streams in cells(arguments):
            requests = max(2, min(48, arguments.round_tokens // (streams * arguments.tokens)))
            rounds: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in bench.variants}
            for variant in bench.variants:
                bench.round(variant, mode, streams, 1)
            for _ in range(arguments.rounds):
                for variant in bench.variants:
                    rounds[variant.name].append(bench.round(variant, mode, streams, requests))
            if arguments.flamegraphs is not None:
                profile(bench, arguments.flamegraphs, mode, streams, requests)
            for name, found in rounds.items():
                rows.append({"variant": name, "mode": mode, "streams": streams, **summary(found)})
                print(markdown(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 256, 512], help="chats at once")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each variant; medians are shown")
    parser.add_argument("--window", type=int, default=1, help="uncoalesced: tokens of a stream on their way")
    parser.add_argument("--coalesced-window", type=int, default=64, help="coalesced: the same")
    parser.add_argument("--interval", type=int, default=1, help="coalesced: tokens of a delta, as with stream_interval")
    parser.add_argument("--step-seconds", type=float, default=0.0005, help="least time of a backend's step")
    parser.add_argument("--round-tokens", type=int, default=80_000, help="about; 2 to 48 requests of each stream")
    parser.add_argument("--connections", type=int, default=1, help="connections that the streams are spread over")
    parser.add_argument("--variant", action="append", default=[], help="see above; may be repeated")
    parser.add_argument("--tokenizer-flags", default="", help="flags of `penstock serve tokenizer`")
    parser.add_argument("--flamegraphs", type=Path, help="folder for flame graphs of one more round (needs py-spy)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="SVG file to draw")
    arguments = parser.parse_args()
    if max(arguments.streams) > SLOTS:
        parser.error(f"--streams: at most {SLOTS}")
    rows = run(arguments)
    settings = {key: value for key, value in vars(arguments).items() if key not in ("out", "plot", "flamegraphs")}
    write("wire", {"settings": settings, "rows": rows}, arguments.out)
    print(markdown(rows))
    if arguments.plot is not None:
        arguments.plot.write_text(plot(rows))


if __name__ == "__main__":
    main()
