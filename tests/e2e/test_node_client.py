"""A client in another language, written from the protos alone."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from factories.stack import Stack
from penstock_client import Client

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "What is Penstock?"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """clients/node with its dependencies installed, in a copy of the layout that it expects."""
    if shutil.which("npm") is None:
        pytest.skip("node and npm are not installed; last run recorded in docs/testing.md")
    root = tmp_path_factory.mktemp("node")
    shutil.copytree(ROOT / "protos", root / "protos")
    folder = root / "clients" / "node"
    shutil.copytree(ROOT / "clients" / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=folder, check=True, timeout=150)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example with node."""
    return subprocess.run(["node", "chat.mjs", *arguments], cwd=folder, capture_output=True, text=True, timeout=60)


def test_node_streams_the_same_chat_as_python(example: Path, stack: Stack) -> None:
    """Greedy text, usage and the finish reason agree."""
    done = run(example, "--address", stack.address, "--max-new-tokens", "64", QUESTION)
    assert done.returncode == 0, done.stderr
    with Client(stack.address) as client:
        expected = client.chat(QUESTION, max_new_tokens=64).result()
    assert done.stdout.rstrip("\n") == expected.text.rstrip("\n")
    summary = json.loads(done.stderr)
    assert summary["finish_reason"] == f"FINISH_REASON_{expected.choices[0].finish_reason}"
    assert summary["usage"]["completion_tokens"] == expected.usage.completion_tokens


def test_node_is_told_the_status_and_field_of_a_bad_request(example: Path, stack: Stack) -> None:
    """An error crosses the language border readable."""
    done = run(example, "--address", stack.address, "--max-new-tokens", "0", QUESTION)
    assert done.returncode == 1
    assert "INVALID_ARGUMENT" in done.stderr
    assert "config.max_new_tokens" in done.stderr
