"""Three models, an adapter, a canary, rolling reloads and loads on demand under closed-loop load: what fails.

    python -m benchmarks many_models --seconds 600 --json FILE

One router by a file of models. `chat` is an alias: two backends of `v1`, with an adapter, and one of the canary `v2`
(weight 1 of 10). `--on-demand` folders are loaded into one slot when a client asks for them, so that they take turns in
it, and leave when idle. Every `--roll-seconds` both backends of `v1` read their weights anew, one after the other. The
greedy ids of each model and of the adapter are compared before, during and after. The exit status is 1 where a request
failed, ids differ, or nothing was rolled, loaded or unloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from factories.models.adapters import lora_folder
from factories.servers import stack
from penstock.common.checkpoint import demo_folder
from penstock_client import AsyncClient, PenstockError

from benchmarks._arguments import refuse
from benchmarks._report import Report, percentile

PROMPTS = ("Tell me about the sea.", "Write one line on stones and water:", "1, 2, 3,")
SPOT_TOKENS = 12
# Requests of a model on demand in a row, before a pause in which it becomes idle.
BURST = 3


class Load:
    """One run: clients, operators and what came of them."""

    def __init__(self, options: argparse.Namespace, address: str, metrics_address: str, on_demand: list[str]) -> None:
        self.options = options
        self.address = address
        self.metrics_address = metrics_address
        self.on_demand = on_demand
        self.until = 0.0
        self.ok: Counter[str] = Counter()
        self.answered_by: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.rolls = 0
        self.roll_steps: Counter[str] = Counter()
        self.checks = self.differing = 0
        self.expected: dict[tuple[str, str, str], list[int]] = {}

    async def run(self) -> None:
        """Put the load on until the time is over."""
        async with AsyncClient(self.address) as client:
            self.expected = await self.spots(client)
            self.until = time.monotonic() + self.options.seconds
            async with asyncio.TaskGroup() as group:
                for number in range(self.options.clients):
                    group.create_task(self.ask_in_a_loop(client, "chat", number))
                group.create_task(self.ask_in_a_loop(client, "v1", 0, adapter="style"))
                for name in self.on_demand:
                    group.create_task(self.ask_in_bursts(client, name))
                group.create_task(self.roll_again_and_again(client))
                group.create_task(self.check_again_and_again(client))
            self.compare(await self.spots(client))

    async def spots(self, client: AsyncClient) -> dict[tuple[str, str, str], list[int]]:
        """Return greedy ids by model, adapter and prompt."""
        found = {}
        for model, adapter in [("v1", ""), ("v1", "style"), ("v2", ""), *((name, "") for name in self.on_demand)]:
            for prompt in PROMPTS:
                named = {"model": model, "adapter": adapter, "return_token_ids": True}
                answer = await client.generate(prompt, max_new_tokens=SPOT_TOKENS, do_sample=False, **named)
                found[model, adapter, prompt] = list(answer.choices[0].token_ids)
        return found

    def compare(self, found: dict[tuple[str, str, str], list[int]]) -> None:
        """Count what differs from the ids before the load."""
        self.checks += len(found)
        self.differing += sum(self.expected[key] != ids for key, ids in found.items())

    async def ask(self, client: AsyncClient, key: str, prompt: str, **request: Any) -> None:
        """Make one request, and count its end."""
        begin = time.monotonic()
        try:
            answer = await client.generate(prompt, **request)
        except PenstockError as error:
            self.failures[f"{key}: {error.code.name} {error.reason}: {error.message}"] += 1
            return
        self.seconds[key].append(time.monotonic() - begin)
        self.ok[key] += 1
        self.answered_by[answer.started.model] += 1

    async def ask_in_a_loop(self, client: AsyncClient, model: str, number: int, adapter: str = "") -> None:
        """Make one request after the other. Every second client is a conversation that stays with one version."""
        session = f"conversation-{number}" if number % 2 else ""
        turn = 0
        while time.monotonic() < self.until:
            prompt, turn = PROMPTS[turn % len(PROMPTS)], turn + 1
            await self.ask(
                client,
                f"{model}+{adapter}" if adapter else model,
                prompt,
                model=model,
                adapter=adapter,
                session_id=session,
                max_new_tokens=self.options.tokens,
            )
            await self.pause(self.options.pause_seconds)

    async def ask_in_bursts(self, client: AsyncClient, model: str) -> None:
        """Make some requests, then none until the model is idle."""
        while time.monotonic() < self.until:
            for prompt in PROMPTS[:BURST]:
                await self.ask(client, model, prompt, model=model, max_new_tokens=self.options.tokens)
            await self.pause(self.options.idle_seconds * 1.5)

    async def roll_again_and_again(self, client: AsyncClient) -> None:
        """Roll `v1` at each interval."""
        while time.monotonic() < self.until:
            await self.pause(self.options.roll_seconds)
            if time.monotonic() >= self.until:
                return
            try:
                steps = await client.roll_model("v1", timeout=300.0)
            except PenstockError as error:
                self.failures[f"roll: {error.code.name} {error.reason}: {error.message}"] += 1
                continue
            self.rolls += 1
            self.roll_steps.update(str(step.step) for step in steps)

    async def check_again_and_again(self, client: AsyncClient) -> None:
        """Compare ids each minute."""
        while time.monotonic() < self.until:
            await self.pause(60.0)
            with contextlib.suppress(PenstockError):
                self.compare(await self.spots(client))

    async def pause(self, seconds: float) -> None:
        """Wait, not beyond the end."""
        await asyncio.sleep(max(0.0, min(seconds, self.until - time.monotonic())))

    def metrics(self) -> dict[str, float]:
        """Return the router's counts of loads and unloads."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = re.findall(r"^penstock_router_(model_(?:un)?loads_total\{[^}]*\}) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def figures(self) -> dict[str, Any]:
        """Return all figures."""
        by_model = {
            key: {
                "requests": self.ok[key],
                "p50_seconds": round(percentile(times, 0.5), 3),
                "p99_seconds": round(percentile(times, 0.99), 3),
                "max_seconds": round(max(times), 3),
            }
            for key, times in sorted(self.seconds.items())
        }
        return {
            "seconds": self.options.seconds,
            "requests": by_model,
            "answered_by": dict(self.answered_by),
            "failures": dict(self.failures),
            "rolls": self.rolls,
            "ids_compared": self.checks,
            "ids_differing": self.differing,
            "loads": self.metrics(),
        }


def _file(tokenizers: dict[str, str], v1: list[str], v2: str, slot: str, root: Path, folders: list[Path]) -> str:
    lines = ['default = "chat"', f'slots = ["{slot}"]']
    for name, weight, backends in (("v1", 9, v1), ("v2", 1, [v2])):
        lines += ["", "[[models]]", f'name = "{name}"', 'aliases = ["chat"]', f"weight = {weight}"]
        lines += [f'tokenizer = ["{tokenizers["demo"]}"]', f"backends = {backends}"]
    for folder in folders:
        lines += ["", "[[models]]", f'name = "{folder.name}"', f'tokenizer = ["{tokenizers[folder.name]}"]']
        lines += [f'path = "{folder.relative_to(root)}"']
    return "\n".join(lines) + "\n"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=4, help="clients of `chat`")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens of an answer")
    parser.add_argument("--pause-seconds", type=float, default=0.0, help="pause of a client between two requests")
    parser.add_argument("--roll-seconds", type=float, default=30.0)
    parser.add_argument("--idle-seconds", type=float, default=8.0, help="--model-idle-seconds of the router")
    parser.add_argument(
        "--on-demand",
        type=Path,
        nargs="*",
        default=[],
        help="folders below one root; by default two copies of the demo",
    )


def main(options: argparse.Namespace, report: Report) -> int:
    """Run it; return the exit status."""
    processes: list[stack.Process] = []
    with tempfile.TemporaryDirectory(prefix="penstock-many-") as made, contextlib.ExitStack() as ends:
        ends.callback(lambda: [process.kill() for process in processes if process.popen.poll() is None])
        scratch = Path(made)
        folders = [folder.resolve() for folder in options.on_demand]
        if not folders:
            for name in ("one", "two"):
                shutil.copytree(demo_folder(), scratch / name)
            folders = [scratch / name for name in ("one", "two")]
        root = folders[0].parent
        if any(folder.parent != root or not folder.is_dir() for folder in folders):
            refuse("--on-demand: the folders must be there, below one root")
        lora_folder(scratch / "style", demo_folder(), seed=1)
        flags = ("--kv-memory", "64MiB", "--threads", "1")

        def start(role: str, *more: str) -> stack.Process:
            processes.append(stack.start(role, *more))
            return processes[-1]

        tokenizers = {"demo": start("tokenizer")}
        for folder in folders:
            tokenizers[folder.name] = start("tokenizer", str(folder))
        lora = ("--lora", f"style={scratch / 'style'}")
        v1 = [start("generation", "--served-model-name", "v1", *lora, *flags) for _ in range(2)]
        v2 = start("generation", "--served-model-name", "v2", *flags)
        slot = start("generation", "--empty", "--model-root", str(root), *flags)
        for process in (*tokenizers.values(), *v1, v2):
            process.wait_ready()
        file = scratch / "models.toml"
        addresses = {name: process.address for name, process in tokenizers.items()}
        file.write_text(_file(addresses, [one.address for one in v1], v2.address, slot.address, root, folders))
        router = start("router", "--models", str(file), "--model-idle-seconds", str(options.idle_seconds))
        router.wait_ready()
        load = Load(options, router.address, router.metrics_address, [folder.name for folder in folders])
        asyncio.run(load.run())
        figures = load.figures()
    report.write({"settings": report.settings, **figures})
    loads = figures["loads"]
    has_moved = load.rolls and all(any(kind in name for name in loads) for kind in ("_loads_total", 'cause="idle"'))
    if load.failures or load.differing or not has_moved:
        print("something failed, differs, or was never rolled, loaded or unloaded", file=sys.stderr)
        return 1
    return 0
