"""Switches between models on demand: seconds from a request for a model that is not loaded to its first token.

    python -m benchmarks model_switch --root FOLDER --rounds 3 --json FILE

`penstock serve --models FOLDER` with two slots. Each round asks the models in turn, so that each but the last two must
be loaded anew, and asks each once more while it is there. At the end the last model is rolled: loaded into the other
slot, beside a client that asks all the time. Pack the folders (`penstock pack`) to see what that gives.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from factories.servers import stack
from penstock_client import AsyncClient, PenstockError

from benchmarks._arguments import refuse
from benchmarks._report import Report

PROMPT, TOKENS = "Tell me about the sea.", 8


async def first_token(client: AsyncClient, model: str) -> tuple[float, list[int]]:
    """Return the seconds to the first delta of a greedy answer, and its ids."""
    begin, first = time.monotonic(), None
    stream = client.stream(PROMPT, model=model, max_new_tokens=TOKENS, do_sample=False, return_token_ids=True)
    ids: list[int] = []
    async with stream:
        async for delta in stream:
            first = first or time.monotonic() - begin
            ids += delta.token_ids
    return first or 0.0, ids


async def measure(address: str, rounds: int) -> dict[str, Any]:
    """Ask, round by round, and roll at the end."""
    cold: dict[str, list[float]] = defaultdict(list)
    warm: dict[str, list[float]] = defaultdict(list)
    answers: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    async with AsyncClient(address) as client:
        names = [model.name for model in await client.list_models()]
        if len(names) < 3:
            refuse("--root: needs three models, one more than slots")
        for _ in range(rounds):
            for name in names:
                for times in (cold, warm):
                    seconds, ids = await first_token(client, name)
                    times[name].append(round(seconds, 3))
                    answers[name].add(tuple(ids))
        rolled = await roll(client, names[-1])
    return {
        "models": {name: {"cold_seconds": cold[name], "warm_seconds": warm[name]} for name in names},
        "ids_equal": all(len(found) == 1 for found in answers.values()),
        "roll": rolled,
    }


async def roll(client: AsyncClient, name: str) -> dict[str, Any]:
    """Roll a model under load; return its seconds, and what became of the requests meanwhile."""
    is_over, ok, failures = False, 0, list[str]()

    async def ask() -> None:
        nonlocal ok
        while not is_over:
            try:
                await first_token(client, name)
                ok += 1
            except PenstockError as error:
                failures.append(f"{error.code.name} {error.reason}")

    asking = asyncio.ensure_future(ask())
    begin = time.monotonic()
    try:
        steps = await client.roll_model(name, timeout=300.0)
    finally:
        is_over = True
        await asking
    return {
        "seconds": round(time.monotonic() - begin, 3),
        "steps": len(steps),
        "requests": ok,
        "failures": failures,
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--root", type=Path, required=True, help="folder with three or more model folders")
    parser.add_argument("--rounds", type=int, default=3)


def main(options: argparse.Namespace, report: Report) -> int:
    """Run it; return the exit status."""
    process = stack.start(None, "--models", str(options.root), "--model-turn-seconds", "0", "--kv-memory", "64MiB")
    try:
        process.wait_ready()
        figures = asyncio.run(measure(process.address, options.rounds))
    finally:
        if process.popen.poll() is None:
            process.terminate()
    report.write({"settings": report.settings, **figures})
    return 1 if figures["roll"]["failures"] or not figures["ids_equal"] else 0
