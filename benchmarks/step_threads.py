"""Work of a serving generation process besides the forward pass: processor time of its threads, per engine step.

    python benchmarks/step_threads.py [MODEL] [--streams 32] [--prompt 128] [--tokens 64] [--threads 2] [--json FILE]

Starts `penstock serve generation` and runs requests on one Session, as the router does. `engine` is the thread of the
steps (with the forward pass, of which the kernels' own threads share the work), `event_loop` that of gRPC's handlers,
which turns every step's outputs into one message; both hold the GIL while they run Python. `rest` are all the others.
The engine's own parts of a step (schedule, update, execute) come from its metrics, by the clock.

`--flamegraph FILE` records the process under the same load once more, with py-spy; `--services DIR` runs the services
of another checkout.
"""

from __future__ import annotations

import argparse
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in (".", "tests")]
from factories.servers.stack import Process, start
from penstock.v1 import config_pb2, generation_pb2, generation_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from benchmarks._arguments import at_least
from benchmarks._processes import stop_on_sigterm
from benchmarks._report import write
from benchmarks._wire_profile import record

TICK = 100.0


def thread_seconds(process: Process) -> dict[int, float]:
    """Processor seconds of every thread so far."""
    found = {}
    for task in Path(f"/proc/{process.popen.pid}/task").iterdir():
        fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        found[int(task.name)] = (int(fields[11]) + int(fields[12])) / TICK
    return found


def metrics(process: Process) -> dict[str, float]:
    """Sums and counts of the engine's histograms."""
    with urllib.request.urlopen(f"http://127.0.0.1:{process.metrics_port}/metrics") as answer:
        text = answer.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith(("_sum", "_count", "_total"))
    }


def commands(streams: int, prompt: int, tokens: int, name: str) -> Iterator[generation_pb2.SessionRequest]:
    """All requests of a round; prompts differ from the first token on."""
    config, stop = config_pb2.GenerationConfig(max_new_tokens=tokens), config_pb2.StopConfig(ignore_eos=True)
    for number in range(streams):
        ids = [number + 5, *((number * 31 + place * 7) % 1000 + 5 for place in range(1, prompt))]
        submit = generation_pb2.GenerateRequest(
            request_id=f"{name}-{number}", prompt_token_ids=ids, config=config, stop=stop
        )
        yield generation_pb2.SessionRequest(submit=submit)


def run_round(stub: generation_pb2_grpc.GenerationServiceStub, options: argparse.Namespace, name: str) -> int:
    """Messages that came back."""
    call = stub.Session(commands(options.streams, options.prompt, options.tokens, name))
    return sum(1 for _ in call)


def profile(process: Process, stub: generation_pb2_grpc.GenerationServiceStub, options: argparse.Namespace) -> None:
    """A flame graph of so many seconds of these rounds; only the main and the engine's thread run Python."""
    with record({options.flamegraph: process.popen.pid}, options.flamegraph_seconds):
        until, number = time.monotonic() + options.flamegraph_seconds, 0
        while time.monotonic() < until:
            run_round(stub, options, f"profile-{number}")
            number += 1


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One round to warm up, then those that count."""
    flags = [*([options.model] if options.model else []), "--threads", str(options.threads), *options.flag]
    path = {"PYTHONPATH": str(options.services / "services")} if options.services is not None else {}
    process = start("generation", *flags, environment=path)
    try:
        process.wait_ready()
        with grpc.insecure_channel(process.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            run_round(stub, options, "warm")
            before, counted, started = thread_seconds(process), metrics(process), time.perf_counter()
            messages = sum(run_round(stub, options, f"round-{number}") for number in range(options.rounds))
            wall = time.perf_counter() - started
            after, now = thread_seconds(process), metrics(process)
            if options.flamegraph is not None:
                profile(process, stub, options)
    finally:
        process.terminate()
        process.log.unlink()
    return summary(process.popen.pid, before, after, {key: now[key] - counted.get(key, 0.0) for key in now}, wall) | {
        "messages": messages
    }


def summary(
    main: int, before: dict[int, float], after: dict[int, float], grown: dict[str, float], wall: float
) -> dict[str, Any]:
    """Milliseconds a step."""
    spent = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    loop = spent.pop(main)
    engine = max(spent.values())
    (steps,) = (value for name, value in grown.items() if name.endswith("engine_steps_total"))
    parts = {
        stage: next(value for name, value in grown.items() if name.endswith(f"engine_{stage}_seconds_sum"))
        for stage in ("schedule", "execute", "update")
    }
    return {
        "steps": int(steps),
        "step_ms": round(wall / steps * 1e3, 3),
        "cpu_ms": {
            "engine": round(engine / steps * 1e3, 3),
            "event_loop": round(loop / steps * 1e3, 3),
            "rest": round((sum(spent.values()) - engine) / steps * 1e3, 3),
        },
        "clock_ms": {stage: round(seconds / steps * 1e3, 3) for stage, seconds in parts.items()},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder or hub id; the embedded model when left out")
    parser.add_argument("--streams", type=at_least(1), default=32)
    parser.add_argument("--prompt", type=at_least(1), default=128)
    parser.add_argument("--tokens", type=at_least(1), default=64)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--flag", action="append", default=[], help="a further flag of the service, such as --flag=...")
    parser.add_argument("--services", type=Path, help="run the services of this other checkout")
    parser.add_argument("--flamegraph", type=Path, help="SVG file to record (needs py-spy)")
    parser.add_argument("--flamegraph-seconds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args()
    stop_on_sigterm()
    settings = {name: getattr(options, name) for name in ("model", "streams", "prompt", "tokens", "threads")}
    write("step_threads", {"settings": settings, **measure(options)}, options.json)


if __name__ == "__main__":
    main()
