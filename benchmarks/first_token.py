"""The time to the first token by stages of a chat through router, tokenizer and generation.

Real processes, the demo model, and a client that costs next to nothing; the services' functions are wrapped from
outside (`_stamps.py`) and note when a request passes. For each number of chats at once, rounds of chats and of direct
calls of GenerationService take turns.

    python benchmarks/first_token.py --streams 1 8 --rounds 6 --out first_token.json
    python benchmarks/first_token.py --variant "before=@/path/to/another/checkout"
    python benchmarks/first_token.py --variant "asyncio=--transport asyncio // --transport asyncio"

Times are milliseconds by the clock, from the stage before (medians over the requests), and processor time of that
thread since its last stamp where the stage begins and ends in one thread; with several chats at once that includes
what the thread did for the others meanwhile. Processor time of whole processes is that of rounds of one token, divided
by the requests: with all on few cores it is what decides how long many chats at once wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import psutil

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT / part) for part in (".", "services", "tests")]
from factories.servers import stack
from penstock.v1 import config_pb2, generation_pb2, text_pb2, tokenizer_pb2, tokenizer_pb2_grpc

from benchmarks._arguments import at_least
from benchmarks._http2 import connect
from benchmarks._processes import stop_on_sigterm
from benchmarks._report import percentile, write

_PATHS = {"routed": "/penstock.v1.TextService/Chat", "direct": "/penstock.v1.GenerationService/Generate"}
# The first byte of both kinds of response says which event it holds.
_DELTA = 0x12
_NUMBERS = itertools.count()
# In the order of a request's way; a stage is from the place before.
PLACES = (
    "client: sent",
    "router: handler",
    "router: template asked",
    "tokenizer: handler",
    "tokenizer: child asked",
    "tokenizer: child answered",
    "tokenizer: encode",
    "tokenizer: ids",
    "tokenizer: answer",
    "router: prompt",
    "router: submitted",
    "generation: command",
    "generation: queued",
    "generation: engine has it",
    "generation: step",
    "generation: step done",
    "generation: delivered",
    "generation: message made",
    "router: token read",
    "router: decode",
    "router: text",
    "router: delta made",
    "router: delta written",
    "client: first token",
)


def cpu_seconds(pid: int) -> dict[str, float]:
    """Processor time of a process so far: its main thread (the event loop), its other threads, its children."""
    found = {"loop": 0.0, "threads": 0.0, "children": 0.0}
    process = psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        for task in Path(f"/proc/{one.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                spent = int((task / "schedstat").read_text().split()[0]) / 1e9
                found["children" if one.pid != pid else "loop" if int(task.name) == pid else "threads"] += spent
    return found


@dataclass
class Variant:
    """Three processes and what was measured with them."""

    name: str
    processes: dict[str, stack.Process]
    stamps: dict[str, Path]

    def cpu(self) -> dict[str, float]:
        """Seconds so far, by process and kind of thread."""
        spent = {role: cpu_seconds(process.popen.pid) for role, process in self.processes.items()}
        return {f"{role} {part}": value for role, parts in spent.items() for part, value in parts.items() if value}


def start_variant(text: str, exits: contextlib.ExitStack, folder: Path) -> Variant:
    """`NAME=FLAGS of the router // of the tokenizer // of the generation service` or `NAME=@DIR`."""
    name, _, flags = text.partition("=")
    other = flags.removeprefix("@") if flags.startswith("@") else ""
    root = Path(other) if other else _ROOT
    environment = {"PYTHONPATH": os.pathsep.join(str(root / part) for part in ("services", "clients/python"))}
    found = Variant(name, {}, {})

    def start(role: str, *more: str) -> stack.Process:
        out = found.stamps[role] = folder / f"{name}-{role}.json"
        program = (str(_ROOT / "benchmarks" / "_stamps.py"), str(out))
        process = stack.start(role, *more, environment=environment, program=program)
        found.processes[role] = process
        exits.callback(process.log.unlink, missing_ok=True)
        exits.callback(process.kill)
        return process

    ours = [""] * 3 if other else [*flags.split("//"), "", ""]
    tokenizer = start("tokenizer", *shlex.split(ours[1]))
    generation = start("generation", "--kv-memory", "64MiB", "--threads", "1", *shlex.split(ours[2]))
    backends = ("--tokenizer", tokenizer.address, "--backend", generation.address)
    start("router", *backends, *shlex.split(ours[0]))
    for process in found.processes.values():
        process.wait_ready()
    return found


def make_request(kind: str, number: int, tokens: int, ids: list[int]) -> bytes:
    """A chat, or the same prompt to GenerationService."""
    config = config_pb2.GenerationConfig(max_new_tokens=tokens, do_sample=False)
    stop = config_pb2.StopConfig(ignore_eos=True)
    name = f"bench-{number}" if kind == "routed" else f"direct-{number}"
    if kind == "direct":
        return generation_pb2.GenerateRequest(
            request_id=name, prompt_token_ids=ids, config=config, stop=stop
        ).SerializeToString()
    message = tokenizer_pb2.Message(role="user", content=f"Tell me about Penstock, number {number}.")
    output = config_pb2.OutputConfig(return_token_ids=True)
    return text_pb2.ChatRequest(
        request_id=name, messages=[message], config=config, stop=stop, output=output
    ).SerializeToString()


def prompt_ids(address: str) -> list[int]:
    """Ids of such a chat."""
    with grpc.insecure_channel(address) as channel:
        message = tokenizer_pb2.Message(role="user", content="Tell me about Penstock, number 1000.")
        request = tokenizer_pb2.ApplyChatTemplateRequest(messages=[message])
        return list(tokenizer_pb2_grpc.TokenizerServiceStub(channel).ApplyChatTemplate(request).token_ids)


class Round:
    """`streams` chats at once, `per_stream` of each one after the other, on one connection."""

    def __init__(self, kind: str, streams: int, per_stream: int, tokens: int, ids: list[int]) -> None:
        self._kind, self._tokens, self._ids = kind, tokens, ids
        self._left = [per_stream] * streams
        self._slot: dict[int, int] = {}
        self._number: dict[int, int] = {}
        self._ended = asyncio.Event()
        self._connection: Any = None
        # Number of the request -> monotonic ns.
        self.sent: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.seconds = 0.0

    async def run(self, address: str) -> None:
        """Do it. Raises RuntimeError when a request brought no token."""
        self._connection = await connect(address, self._on_message, self._on_end)
        begin = time.monotonic()
        for slot in range(len(self._left)):
            self._next(slot)
        await self._ended.wait()
        self.seconds = time.monotonic() - begin
        self._connection.close()
        if len(self.first) != len(self.sent):
            last = self._connection.trailers.decode(errors="replace")
            raise RuntimeError(f"{len(self.sent) - len(self.first)} of {len(self.sent)} requests failed: {last!r}")

    def milliseconds(self) -> list[float]:
        """Times from sent to first token, of every request."""
        return [(self.first[number] - at) / 1e6 for number, at in self.sent.items()]

    def _next(self, slot: int) -> None:
        self._left[slot] -= 1
        # Wide enough that prompts are equally long.
        number = 1000 + next(_NUMBERS)
        payload = make_request(self._kind, number, self._tokens, [*self._ids[:-1], number % 500 + 5, self._ids[-1]])
        self.sent[number] = time.monotonic_ns()
        stream = self._connection.request(_PATHS[self._kind], payload)
        self._slot[stream], self._number[stream] = slot, number

    def _on_message(self, stream: int, message: bytes) -> None:
        if message[0] == _DELTA:
            self.first.setdefault(self._number[stream], time.monotonic_ns())

    def _on_end(self, stream: int) -> None:
        slot = self._slot.pop(stream)
        if self._left[slot]:
            self._next(slot)
        elif not self._slot:
            self._ended.set()


class Measured:
    """Rounds of one variant with one number of streams."""

    def __init__(self, variant: Variant, ids: list[int]) -> None:
        self.variant = variant
        self._ids = ids
        self.first: dict[str, list[float]] = {"direct": [], "routed": []}
        self.sent: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self._cpu: list[dict[str, float]] = []
        self._seconds: list[float] = []

    def round(self, kind: str, streams: int, per_stream: int, tokens: int) -> Round:
        """One round of load."""
        role = "router" if kind == "routed" else "generation"
        load = Round(kind, streams, per_stream, tokens, self._ids)
        asyncio.run(load.run(self.variant.processes[role].address))
        return load

    def measure(self, streams: int, per_stream: int, tokens: int) -> None:
        """A round of each kind, and one of a token each for processor time."""
        for kind, values in self.first.items():
            load = self.round(kind, streams, per_stream, tokens)
            values += load.milliseconds()
            if kind == "routed":
                self._seconds.append(load.seconds)
                self.sent |= load.sent
                self.ended |= load.first
        before = self.variant.cpu()
        load = self.round("routed", streams, 4 * per_stream, 1)
        after = self.variant.cpu()
        self._cpu.append({name: (after[name] - before.get(name, 0.0)) / len(load.sent) * 1e3 for name in after})

    def summary(self) -> dict[str, Any]:
        """Percentiles, and processor milliseconds of a request of one token."""
        names = self._cpu[0]
        found: dict[str, Any] = {"requests": len(self.sent)}
        for kind, values in self.first.items():
            found[kind] = {"p50_ms": percentile(values, 0.5), "p99_ms": percentile(values, 0.99)}
        found["round_s"] = median(self._seconds)
        found["added"] = {key: found["routed"][key] - found["direct"][key] for key in ("p50_ms", "p99_ms")}
        found["cpu_ms"] = {name: median(one.get(name, 0.0) for one in self._cpu) for name in names}
        return found


def stages(measured: Measured) -> list[dict[str, Any]]:
    """Median times of every stage, once the processes have written their stamps."""
    at: dict[str, dict[str, tuple[int, int]]] = {place: {} for place in PLACES}
    for path in measured.variant.stamps.values():
        for place, key, clock, cpu in json.loads(path.read_text()):
            at[place][key] = (clock, cpu)
    for place, stamps in ((PLACES[0], measured.sent), (PLACES[-1], measured.ended)):
        at[place] = {str(number): (clock, 0) for number, clock in stamps.items()}
    keys = [str(number) for number in measured.sent]
    rows = []
    # A transport may have no such place: what is written without a task does not pass the writer.
    passed = [place for place in PLACES if at[place]]
    for earlier, place in itertools.pairwise(passed):
        both = [(at[earlier][key], at[place][key]) for key in keys if key in at[earlier] and key in at[place]]
        if not both:
            continue
        one_thread = earlier.partition(":")[0] == place.partition(":")[0] != "client"
        cpu = median(max(0, second[1] - first[1]) for first, second in both) / 1e6 if one_thread else None
        rows.append(
            {
                "from": earlier,
                "to": place,
                "p50_ms": median(second[0] - first[0] for first, second in both) / 1e6,
                "p90_ms": percentile([(second[0] - first[0]) / 1e6 for first, second in both], 0.9),
                "thread_cpu_ms": None if cpu is None or place in _OTHER_THREAD else cpu,
            }
        )
    return rows


# Stages that end in another thread than they begin in.
_OTHER_THREAD = {
    *("tokenizer: encode", "tokenizer: answer"),
    *("generation: engine has it", "generation: delivered"),
}


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each variant and number of streams."""
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-first-token-")))
        variants = [start_variant(text, exits, folder) for text in ["now=", *arguments.variant]]
        ids = prompt_ids(variants[0].processes["tokenizer"].address)
        found: list[tuple[int, Measured]] = []
        for streams in arguments.streams:
            cells = [Measured(variant, ids) for variant in variants]
            for cell in cells:
                for kind in _PATHS:
                    cell.round(kind, streams, 4, arguments.tokens)
            for _ in range(arguments.rounds):
                for cell in cells:
                    cell.measure(streams, arguments.per_stream * max(1, 8 // streams), arguments.tokens)
            found += [(streams, cell) for cell in cells]
        rows = [{"variant": cell.variant.name, "streams": streams, **cell.summary()} for streams, cell in found]
        for variant in variants:
            for process in reversed(variant.processes.values()):
                process.terminate()
        for row, (_, cell) in zip(rows, found, strict=True):
            row["stages"] = stages(cell)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The tables of dev/log/performance-history.md."""
    head = [f"{row['variant']}, {row['streams']}" for row in rows]
    lines = ["| milliseconds | " + " | ".join(head) + " |", "|---" * (len(rows) + 1) + "|"]

    def add(name: str, cells: list[str]) -> None:
        lines.append(f"| {name} | " + " | ".join(cells) + " |")

    for kind in ("direct", "routed", "added"):
        add(f"{kind}, p50 / p99", [f"{row[kind]['p50_ms']:.1f} / {row[kind]['p99_ms']:.1f}" for row in rows])
    add("a round of chats, s", [f"{row['round_s']:.2f}" for row in rows])
    for name in rows[0]["cpu_ms"]:
        add(f"CPU: {name}", [f"{row['cpu_ms'].get(name, 0.0):.2f}" for row in rows])
    add("CPU: together", [f"{sum(row['cpu_ms'].values()):.2f}" for row in rows])
    for place in PLACES[1:]:
        cells = [next((stage for stage in row["stages"] if stage["to"] == place), None) for row in rows]
        if any(cells):
            add(place, [_cell(cell) for cell in cells])
    return "\n".join(lines)


def _cell(stage: dict[str, Any] | None) -> str:
    if stage is None:
        return ""
    cpu = stage["thread_cpu_ms"]
    return f"{stage['p50_ms']:.2f}" + ("" if cpu is None else f" ({cpu:.2f})")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=at_least(1), nargs="+", default=[1, 8], help="chats at once")
    parser.add_argument("--per-stream", type=at_least(1), default=4, help="requests of each in a round (of 8 or more)")
    parser.add_argument("--rounds", type=at_least(1), default=6, help="rounds of each variant")
    parser.add_argument("--tokens", type=at_least(1), default=48, help="output tokens of a request")
    parser.add_argument("--variant", action="append", default=[], help="see above, and wire.py; may be repeated")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    stop_on_sigterm()
    rows = run(arguments)
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    write("first_token", {"settings": settings, "rows": rows}, arguments.out)
    print(markdown(rows))


if __name__ == "__main__":
    main()
