"""The load that the serving layer can carry: router, tokenizer and client around a backend that emits tokens at will.

Everything is a process of its own on this machine; the tokenizer and the router are the real ones. Two kinds of load:

* uncoalesced: a stream gets its next token when the client has received the one before (`--window`), so every token is
  a message of its own to a reader that keeps up, at any rate;
* coalesced: a stream may be `--coalesced-window` tokens ahead of the client, and the router merges what waits for a
  reader, as it does by default; `--interval 8` is a request with `stream_interval` 8.

The backend steps like an engine, at most every `--step-seconds`, with one message for all streams.

    python -m benchmarks wire --out wire.json --plot wire.svg
    python -m benchmarks wire --streams 64 256 --variant "two=--processes 2" --connections 8
    python -m benchmarks wire --variant before=@/path/to/another/checkout

Variants take turns, round by round. A variant is `NAME=FLAGS` (flags of `penstock serve router`, and behind `//` of the
tokenizer) or `NAME=@DIR` (the services of another checkout); CPU time is that of a process and its children, from
/proc/PID/stat. `--gateway` adds Penstock's HTTP gateway before a router of its own, read as server-sent events on a
connection for each stream; `--gateway-variant` adds further ones, as NAME=FLAGS (of `penstock serve gateway`) or
NAME=@DIR. `--smg` adds the smg gateway (`make peers`) before a worker that emits the same ids in the same steps by the
same window, read by the same client: over HTTP/2, and over HTTP/1.1 on a connection for each stream ("smg1"). Every
variant's text is compared with the answer first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._arguments import refuse
from benchmarks._report import Report

_ROOT = Path(__file__).resolve().parents[1]
from benchmarks import _wire_smg
from benchmarks._arguments import at_least
from benchmarks._report import Table
from benchmarks._wire_profile import flamegraphs
from benchmarks._wire_report import COLUMNS, markdown, plot
from benchmarks._wire_stack import GATEWAY, MODES, SLOTS, SMG, SMG_1, Processes, Side, Variant, cpu_seconds, memory_mb


class Bench:
    """The running processes, and rounds of load on them."""

    def __init__(self, arguments: argparse.Namespace, exits: contextlib.ExitStack) -> None:
        self._arguments = arguments
        self.processes = Processes(arguments, exits)
        self._client = self.processes.client()
        self.variants = [self.processes.variant(text) for text in ["now=", *arguments.variant]]
        if arguments.gateway:
            self.variants.append(self.processes.gateway(f"{GATEWAY}="))
        self.variants += [self.processes.gateway(text) for text in arguments.gateway_variant]
        if arguments.smg:
            self.variants += self.processes.smg()

    def check(self, variant: Variant, mode: str, streams: int) -> None:
        """A chat of each stream. Raises SystemExit when one that ended well is not the answer."""
        found = self._load(variant.sides[mode], streams, 1, texts=True)
        if set(found["texts"]) - {self.processes.answer.text}:
            raise SystemExit(f"{variant.name}, {mode}, {streams} streams: other text than the backend sent")

    def _load(self, side: Side, streams: int, requests: int, *, texts: bool = False) -> dict[str, Any]:
        task = {"address": side.address, "protocol": side.protocol, "streams": streams, "requests": requests}
        task |= {"connections": self._arguments.connections, "texts": texts}
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(json.dumps(task).encode() + b"\n")
        self._client.stdin.flush()
        line = self._client.stdout.readline()
        if not line:
            raise SystemExit(f"the client gave up on {side.address}; its reason is above")
        result: dict[str, Any] = json.loads(line)
        if result["failed"]:
            print(f"{streams} streams: {result['failed']} failed: {result['problems']}", file=sys.stderr, flush=True)
        if not result["tokens"]:
            raise SystemExit(f"{side.address}: no token came in {streams} streams; why is above")
        expected = streams * requests * self._arguments.tokens
        if not result["failed"] and result["tokens"] != expected:
            raise SystemExit(f"{side.address}: {result['tokens']} tokens came of {expected}")
        return result

    def round(self, variant: Variant, mode: str, streams: int, requests: int) -> dict[str, Any]:
        """One round of load, with the processor time of everyone."""
        side = variant.sides[mode]
        before = {name: cpu_seconds(pid) for name, pid in side.pids.items()}
        result = self._load(side, streams, requests)
        cpu = {name: cpu_seconds(pid) - before[name] for name, pid in side.pids.items()}
        cpu["client"] = result.pop("cpu_seconds")
        result["cpu_us_per_token"] = {name: spent / result["tokens"] * 1e6 for name, spent in cpu.items()}
        result["rss_mb"] = {name: memory_mb(pid) for name, pid in side.pids.items() if name != "backend"}
        return result


def profile(bench: Bench, folder: Path, mode: str, streams: int, requests: int) -> None:
    """Flame graphs of the processes of each variant under this load; smg is no Python."""
    for variant in bench.variants:
        side = variant.sides[mode]
        if variant.name in (SMG, SMG_1):
            continue
        with flamegraphs(folder, f"{variant.name}-{mode}-{streams}", side.pids) as seconds:
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
    table = Table(COLUMNS, arguments.json)
    with contextlib.ExitStack() as exits:
        bench = Bench(arguments, exits)
        for mode, streams in cells(arguments):
            requests = max(2, min(48, arguments.round_tokens // (streams * arguments.tokens)))
            rounds: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in bench.variants}
            for variant in bench.variants:
                bench.check(variant, mode, streams)
            for _ in range(arguments.rounds):
                for variant in bench.variants:
                    rounds[variant.name].append(bench.round(variant, mode, streams, requests))
            if arguments.flamegraphs is not None:
                profile(bench, arguments.flamegraphs, mode, streams, requests)
            for name, found in rounds.items():
                settings = {"variant": name, "mode": mode, "streams": streams, "window": bench.processes.window(mode)}
                rows.append({**settings, **summary(found)})
                table.line(markdown(rows[-1:]).splitlines()[-1])
    return rows


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--streams", type=at_least(1), nargs="+", default=[1, 8, 64, 256, 512], help="chats at once")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tokens", type=at_least(1), default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="rounds of each variant; medians are shown")
    parser.add_argument("--window", type=int, default=1, help="uncoalesced: tokens of a stream on their way; 0: any")
    parser.add_argument("--coalesced-window", type=int, default=64, help="coalesced: the same")
    parser.add_argument("--interval", type=int, default=1, help="coalesced: tokens of a delta, as with stream_interval")
    parser.add_argument("--step-seconds", type=float, default=0.0005, help="least time of a backend's step")
    parser.add_argument("--round-tokens", type=int, default=80_000, help="about; 2 to 48 requests of each stream")
    parser.add_argument("--connections", type=at_least(1), default=1, help="connections that streams are spread over")
    parser.add_argument("--variant", action="append", default=[], help="see above; may be repeated")
    parser.add_argument("--gateway", action="store_true", help="Penstock's HTTP gateway, over HTTP/1.1, as a variant")
    parser.add_argument("--gateway-variant", action="append", default=[], help="see above; may be repeated")
    parser.add_argument("--smg", action="store_true", help="the smg gateway as a variant, if `make peers` installed it")
    parser.add_argument("--smg-flags", default="", help="more flags of `smg launch`")
    parser.add_argument("--tokenizer-flags", default="", help="flags of `penstock serve tokenizer`")
    parser.add_argument("--flamegraphs", type=Path, help="folder for flame graphs of one more round (needs py-spy)")
    parser.add_argument("--plot", type=Path, help="SVG file to draw")


def main(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    if max(arguments.streams) > SLOTS:
        refuse(f"--streams: at most {SLOTS}")
    if arguments.smg and not _wire_smg.PROGRAM.is_file():
        print(f"smg is left out: there is no {_wire_smg.PROGRAM}; `make peers` makes it", file=sys.stderr)
        arguments.smg = False
    rows = run(arguments)
    report.save({"settings": report.settings, "rows": rows})
    if arguments.plot is not None:
        arguments.plot.write_text(plot(rows))
