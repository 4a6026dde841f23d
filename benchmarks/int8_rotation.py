"""The cost of turning the blocks of int8's inputs: products and decode steps with it and without, in turns.

    python benchmarks/int8_rotation.py [--model smollm2-135m] [--rows 1,8,32,512] [--batch 1,8] [--turns 30]

Both are in one process and of the same weights; a turn is one call of each, in an order that changes. A ratio is the
time with it over that without, of neighbours; its median and quartiles are shown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from penstock.common.environment import quiet_environment

from benchmarks._arguments import at_least, numbers
from benchmarks._report import Table, save
from benchmarks.checkpoints import CACHE, resolve
from benchmarks.decode_steps import Steps
from benchmarks.real_models import MODELS, bf16_folder

# Outputs and inputs: gate and up, down of SmolLM2 135M, Qwen2.5 0.5B and Llama 3.2 1B.
SHAPES = ((3072, 576), (576, 1536), (9728, 896), (896, 4864), (16384, 2048), (2048, 8192))
COLUMNS = ("cell", "without, µs", "with, µs", "ratio", "quartiles")


def ratios(without: Callable[[], object], turned: Callable[[], object], turns: int) -> dict[str, Any]:
    """Time both in turns."""
    calls = (without, turned)
    for call in calls:
        call()
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            started = time.perf_counter()
            calls[which]()
            times[which].append(time.perf_counter() - started)
    found = [b / a for a, b in zip(*times, strict=True)]
    low, median, high = statistics.quantiles(found, n=4)
    return {
        "without_us": round(statistics.median(times[0]) * 1e6, 1),
        "with_us": round(statistics.median(times[1]) * 1e6, 1),
        "ratio": round(median, 3),
        "quartiles": [round(low, 3), round(high, 3)],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Products first, then steps of a model."""
    import torch
    from penstock.generation.devices import cpu
    from penstock.generation.layers.linear.native import Format, NativeLinearMethod
    from penstock.generation.models.registry import load_model

    device = cpu.CPUDevice()
    device.start(num_threads=options.threads, kernels="native")
    table = Table(COLUMNS, options.json)
    cells: list[dict[str, Any]] = []

    def note(cell: str, found: dict[str, Any]) -> None:
        cells.append({"cell": cell, **found})
        table.row(cell, *found.values())

    for outputs, inputs in SHAPES:
        weight = torch.randn(outputs, inputs).bfloat16()
        plain, turned_linear = (
            NativeLinearMethod(one).linear(weight, None) for one in (Format.INT8, Format.ROTATED_INT8)
        )
        for rows in options.rows:
            x = torch.randn(rows, inputs).bfloat16()
            note(
                f"{outputs} x {inputs}, {rows} rows",
                ratios(partial(plain, x), partial(turned_linear, x), options.turns),
            )
    is_real = options.model in MODELS
    folder = bf16_folder(options.model, options.cache) if is_real else resolve(options.model, options.cache)
    turned = load_model(folder, dtype="bfloat16", quantization="int8", device=device)
    with mock.patch.object(cpu, "formats", return_value=(Format.INT8, Format.INT8)):
        without = load_model(folder, dtype="bfloat16", quantization="int8", device=device)
    kernels = device.sampling_kernels()
    for batch in options.batch:
        first, second = (Steps(one, kernels, batch, options.context, options.turns + 4) for one in (without, turned))
        note(f"a step of {batch}", ratios(first.step, second.step, options.turns))
    return {"model": options.model, "device": device.describe(), "load_average": os.getloadavg()[0], "cells": cells}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a real model, a shape's name or a folder")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--rows", type=numbers, default="1,8,32,512", help="of a product, a list with commas")
    parser.add_argument("--batch", type=numbers, default="1,8", help="sequences a step, a list with commas")
    parser.add_argument("--context", type=at_least(1), default=192)
    parser.add_argument("--turns", type=at_least(4), default=30)
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--json", type=Path, help="file for the result; - is standard output")
    options = parser.parse_args()
    wanted = quiet_environment(options.threads)
    if any(os.environ.get(name) != value for name, value in wanted.items()):  # read when torch is loaded: start again
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    save("int8_rotation", measure(options), options.json)


if __name__ == "__main__":
    main()
