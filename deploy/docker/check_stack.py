"""Run the compose stack for real: build, up, healthy, chat, scale, kill a backend, scrape; then take it down.

Needs a Docker engine and docker-compose. Where no image registry is reachable, run deploy/docker/offline.sh first and
source deploy/docker/offline.env. The result is printed, and written as Markdown with --out.

    python deploy/docker/check_stack.py --out dev/log/compose-run.md
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from penstock_client import AsyncClient, Client, Completion

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "penstock-check"
ROUTER = f"localhost:{os.environ.get('PENSTOCK_GRPC_PORT', '50050')}"
PROMETHEUS = f"http://localhost:{os.environ.get('PROMETHEUS_PORT', '9090')}"
# Grafana is left out: its image comes from a registry only, and a test checks its dashboard against the metrics.
SERVICES = ["tokenizer", "generation", "router", "prometheus"]


def run(*command: str) -> str:
    """Run a command and return its output. Raises CalledProcessError; the command's errors go to the terminal."""
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def compose(*arguments: str) -> str:
    """docker-compose with this check's own project name."""
    return run("docker-compose", "-p", PROJECT, "--profile", "observability", *arguments)


def until(condition: Callable[[], bool], what: str, timeout: float = 120.0) -> None:
    """Poll until `condition` holds. Raises TimeoutError that names `what`."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:.0f} s")
        time.sleep(0.5)


def containers(service: str) -> list[str]:
    """Ids of the running containers of a service."""
    return compose("ps", "-q", service).split()


def healthy(service: str) -> bool:
    """Every container of the service runs and reports healthy."""
    states = [run("docker", "inspect", "-f", "{{.State.Health.Status}}", one).strip() for one in containers(service)]
    return bool(states) and all(state == "healthy" for state in states)


def query(expression: str) -> list[float]:
    """Values of an instant query at Prometheus."""
    url = f"{PROMETHEUS}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(url, timeout=10) as response:
        answer = json.load(response)
    return [float(series["value"][1]) for series in answer["data"]["result"]]


class Report:
    """Steps with their durations and a line of what was seen."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, str]] = []

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Time a step; what it appends to the list is its result."""
        seen: list[str] = []
        start = time.monotonic()
        yield seen
        self.rows.append((name, time.monotonic() - start, "; ".join(seen)))
        print(f"{name}: {self.rows[-1][2]} ({self.rows[-1][1]:.1f} s)", flush=True)

    def markdown(self) -> str:
        """The whole run as a page."""
        commit = run("git", "rev-parse", "--short", "HEAD").strip()
        engine = run("docker", "version", "-f", "{{.Server.Version}}").strip()
        head = (
            "# Last run of the compose stack\n\n"
            f"`python deploy/docker/check_stack.py`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {commit}, Docker "
            f"{engine}, base image `{os.environ.get('PENSTOCK_BASE', 'python:3.11-slim-bookworm')}`.\n\n"
            "| step | seconds | seen |\n|---|---|---|\n"
        )
        return head + "".join(f"| {name} | {seconds:.1f} | {seen} |\n" for name, seconds, seen in self.rows)


def image_facts(role: str) -> str:
    """User, and whether torch and a compiler are in the image of a role."""
    image = f"penstock-{role}:{os.environ.get('PENSTOCK_VERSION', '0.1.0')}"
    find = (
        "import importlib.util as u, os, shutil; "
        "print(os.getuid(), bool(u.find_spec('torch')), bool(shutil.which('g++') or shutil.which('c++')))"
    )
    uid, torch, compiler = run("docker", "run", "--rm", "--entrypoint", "python", image, "-c", find).split()
    if uid == "0" or (torch == "True") != (role == "generation") or compiler == "True":
        raise RuntimeError(f"{image}: uid {uid}, torch {torch}, compiler {compiler}")
    size = int(run("docker", "image", "inspect", "-f", "{{.Size}}", image))
    return f"{role} {size / 1e6:.0f} MB (uid {uid}, torch {torch}, compiler {compiler})"


def device_of_generation() -> str:
    """What the running generation service says that it computes on. Raises RuntimeError without C++ kernels."""
    logs = compose("logs", "--no-color", "generation")
    line = next(line for line in logs.splitlines() if " on cpu (" in line)
    device = line[line.index("cpu (") :]
    if "kernels" not in device:
        raise RuntimeError(f"generation runs without its kernels: {device}")
    return device


async def kill_one_of_two() -> list[Completion]:
    """16 long chats; one backend is killed once every chat has begun."""
    async with AsyncClient(ROUTER) as client:
        streams = [client.chat(f"{i}: count from 1 to 20.", max_new_tokens=600, ignore_eos=True) for i in range(16)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        await asyncio.to_thread(run, "docker", "kill", containers("generation")[0])
        return await asyncio.gather(*(stream.result() for stream in streams))


def check(report: Report) -> None:
    """The steps, in order. Raises on the first that fails."""
    with report.step("build") as seen:
        compose("build", "-q", "tokenizer", "generation", "router")
        seen += [image_facts(role) for role in ("router", "tokenizer", "generation")]
    with report.step("up") as seen:
        compose("up", "-d", *SERVICES)
        for service in ("tokenizer", "generation", "router"):
            until(lambda service=service: healthy(service), f"{service} healthy")  # type: ignore[misc]
        seen.append(f"tokenizer, generation and router healthy; generation on {device_of_generation()}")
    with report.step("chat") as seen, Client(ROUTER) as client:
        answer = client.chat("What is Penstock?", max_new_tokens=64).result()
        seen.append(f"{answer.text.strip()!r}, {answer.choices[0].finish_reason}")
    with report.step("scale generation to 2") as seen:
        compose("up", "-d", "--no-recreate", "--scale", "generation=2", *SERVICES)
        until(lambda: len(containers("generation")) == 2 and healthy("generation"), "two healthy backends")
        with Client(ROUTER) as client:
            until(lambda: client.get_model().backends == 2, "the router sees both")
        seen.append("the router sees 2 backends")
    with report.step("metrics") as seen:
        until(lambda: sum(query('up{job=~"penstock-.*"}')) == 4, "Prometheus scrapes 4 targets")
        until(lambda: sum(query("penstock_generation_tokens_total")) > 0, "Prometheus has counted tokens")
        seen.append("4 targets up, penstock_generation_tokens_total > 0")
    with report.step("kill one of two backends under 16 streams") as seen:
        completions = asyncio.run(kill_one_of_two())
        if any(one.usage.completion_tokens != 600 for one in completions):
            raise RuntimeError("a stream lost tokens")
        moved = sum(one.finished.attempts > 1 for one in completions)
        seen.append(f"16 of 16 streams finished with all their tokens, {moved} of them moved")
    with report.step("stop") as seen:
        survivors = [*containers("router"), *containers("tokenizer"), *containers("generation")]
        compose("stop")
        codes = [run("docker", "inspect", "-f", "{{.State.ExitCode}}", one).strip() for one in survivors]
        seen.append(f"exit codes {', '.join(codes)}")
        if any(code not in ("0", "137") for code in codes) or codes.count("137") > 1:
            raise RuntimeError(f"exit codes {codes}")


def main() -> int:
    """Run the check and always take the stack down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    arguments = parser.parse_args()
    report = Report()
    try:
        check(report)
    except BaseException:
        print(compose("logs", "--tail", "40"), file=sys.stderr)
        raise
    finally:
        compose("down", "-v", "--remove-orphans")
    if arguments.out:
        arguments.out.write_text(report.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
