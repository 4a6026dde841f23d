"""Cost of the engine in a step besides model and sampler: schedule and update, with a runner that does nothing.

    python -m benchmarks engine_overhead [--sequences 1,8,32] [--contexts 128,4096] [--queued 1000] [--out FILE]

`step` is the whole of Engine.step and Engine.load. Target (performance.md): at 32 decoding sequences at most 1 ms a
step with the sampler, flat as context and pool grow.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from penstock.generation.core.request import Request
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.step import RunnerOutput, SampledToken, SchedulerOutput
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.engine import Engine
from penstock.text.token_bytes import TokenBytes

from benchmarks._report import Report, percentile

BLOCK_SIZE = 16
WARM_UP_STEPS = 20
TOKEN = 7


class NullRunner:
    """A runner that draws the same token for every sequence, at no cost worth counting."""

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        token = SampledToken(TOKEN)
        return RunnerOutput({drawer.seq_id: token for entry in output.scheduled for drawer in entry.sample}, {})

    def release(self, seq_ids: Sequence[int]) -> None:
        """Keeps nothing."""


def measure(num_sequences: int, context: int, steps: int, queued: int, *, stop_strings: bool) -> dict[str, Any]:
    """Milliseconds a step of `num_sequences` single requests decoding at `context` tokens."""
    blocks = -(-(context + steps + WARM_UP_STEPS + 8) // BLOCK_SIZE) * num_sequences
    config = EngineConfig(
        num_blocks=blocks + blocks // 50 + 1,
        block_size=BLOCK_SIZE,
        max_context_tokens=context + steps + 1000,
        max_batch_tokens=max(num_sequences * context, 512),
        max_running_sequences=num_sequences,
    )
    engine = Engine(config, NullRunner(), TokenBytes({TOKEN: b" stop"}, special=[]))
    params = SamplingParams(steps + WARM_UP_STEPS + 8, stop_strings=("stopping", "\n\n") if stop_strings else ())
    for number in range(num_sequences):
        prompt = [number, *range(1, context)]
        engine.add(Request(f"request-{number}", prompt, params, time.monotonic()))
    while engine.load().pending_prompt_tokens or engine.num_waiting:
        engine.step()
    for number in range(queued):
        engine.add(Request(f"queued-{number}", list(range(context)), params, time.monotonic()))
    for _ in range(WARM_UP_STEPS):
        engine.step()
    engine.stats.drain_steps()
    whole, deliveries = [], 0
    for _ in range(steps):
        started = time.perf_counter()
        deliveries += len(engine.step())
        engine.load()
        whole.append(time.perf_counter() - started)
    samples = engine.stats.drain_steps()
    assert deliveries == num_sequences * steps
    return {
        "sequences": num_sequences,
        "context": context,
        "queued": queued,
        "stop_strings": stop_strings,
        "schedule_ms_p50": _ms(sample.schedule_seconds for sample in samples),
        "update_ms_p50": _ms(sample.update_seconds for sample in samples),
        "step_ms_p50": _ms(whole),
        "step_ms_p99": round(percentile(whole, 0.99) * 1e3, 3),
    }


def _ms(seconds: Any) -> float:
    return round(statistics.median(seconds) * 1e3, 4)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--sequences", default="1,8,32,128")
    parser.add_argument("--contexts", default="128,4096,32768")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--queued", type=int, default=0, help="requests that wait for a place meanwhile")


def main(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    cells = [
        measure(sequences, context, arguments.steps, arguments.queued, stop_strings=stop_strings)
        for sequences in map(int, arguments.sequences.split(","))
        for context in map(int, arguments.contexts.split(","))
        if sequences * context <= 1 << 21
        for stop_strings in (False, True)
    ]
    report.write({"block_size": BLOCK_SIZE, "cells": cells})
