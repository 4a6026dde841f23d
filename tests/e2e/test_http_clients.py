"""Unmodified clients of OpenAI's HTTP against the gateway of a running tree, each in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factories.servers.stack import START_TIMEOUT, Process, free_port, start

pytestmark = pytest.mark.clients
PROGRAMS = Path(__file__).resolve().parents[1] / "clients" / "http"
# litellm 1.106 imports mcp for tools, and does not ask for it.
CLIENTS = {"litellm": ("litellm>=1.80,<2", "mcp"), "langchain": ("langchain-openai>=1,<2",)}
QUESTION = "What is a penstock?"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Base of OpenAI's paths of `penstock serve` with the demo model."""
    port = free_port()
    tree = start(None, "--http-port", str(port))
    try:
        _wait_ready(f"http://127.0.0.1:{port}/readyz", tree)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        tree.terminate()
        tree.log.unlink(missing_ok=True)


def _wait_ready(address: str, tree: Process) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        assert tree.popen.poll() is None, tree.output()
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise AssertionError(tree.output())


@pytest.fixture(scope="module", params=CLIENTS)
def seen(request: pytest.FixtureRequest, url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Output of a client's program."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", *CLIENTS[request.param]]
    if subprocess.run(install, check=False, timeout=600).returncode:
        pytest.skip(f"{request.param} cannot be installed; last run recorded in docs/learn/testing.md")
    command = [python, "-I", str(PROGRAMS / f"{request.param}_client.py"), url, QUESTION, json.dumps(TOOL)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_an_answer_is_that_of_the_plain_api(seen: dict[str, Any], url: str) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16, "temperature": 0}
    asked = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        plain = json.load(answer)
    assert seen["text"] == "".join(seen["pieces"]) == plain["choices"][0]["message"]["content"]
    assert len([piece for piece in seen["pieces"] if piece]) > 2
    assert seen["usage"] == [plain["usage"]["prompt_tokens"], 16]


def test_a_forced_call_comes_with_its_arguments(seen: dict[str, Any]) -> None:
    name, arguments = seen["call"]
    assert name == "get_weather"
    assert arguments["city"] in ("Oslo", "Paris")


def test_a_refusal_names_its_field(seen: dict[str, Any]) -> None:
    assert "max_" in seen["refused"]
    assert "tokens" in seen["refused"]
