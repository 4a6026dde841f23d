"""An unmodified smg (Shepherd Model Gateway) in front of our generation service, by vLLM's gRPC protocol; and our own
router before it by the same."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factories.servers import stack
from factories.servers.stack import Process, free_port, wait_idle
from penstock_client import Client

pytestmark = pytest.mark.clients
TEXT = "The capital of France is"
MODEL = "penstock-demo"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def generation() -> Iterator[Process]:
    """Start a generation service of the embedded model that speaks both protocols."""
    process = stack.start("generation", "--vllm-engine", "--kv-memory", "64MiB")
    try:
        process.wait_ready()
        yield process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Process]:
    process = stack.start("tokenizer")
    try:
        process.wait_ready()
        yield process
    finally:
        process.kill()


def router(tokenizer: Process, backend: str) -> Process:
    """Start a router before a backend."""
    process = stack.start("router", "--tokenizer", tokenizer.address, "--backend", backend)
    process.wait_ready()
    return process


@pytest.fixture(scope="module")
def own(tokenizer: Process, generation: Process) -> Iterator[Client]:
    """Start a router by our own protocol."""
    process = router(tokenizer, generation.address)
    with Client(process.address) as client:
        yield client
    process.kill()


@pytest.fixture(scope="module")
def smg_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install smg into an environment of its own, or take the one that PENSTOCK_SMG names."""
    named = os.environ.get("PENSTOCK_SMG")
    if named:
        return named
    folder = tmp_path_factory.mktemp("smg")
    venv.create(folder, with_pip=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "smg>=1.13"]
    if subprocess.run(command, check=False, timeout=500).returncode:
        pytest.skip("smg cannot be installed; last run recorded in docs/learn/testing.md")
    return str(folder / "bin" / "smg")


@pytest.fixture(scope="module")
def gateway(smg_program: str, generation: Process) -> Iterator[str]:
    """Start smg before the generation service, which is its only worker; it takes the tokenizer from there."""
    port, metrics_port = free_port(), free_port()
    log = Path(tempfile.mkstemp(prefix="smg-", suffix=".log")[1])
    command = [smg_program, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--worker-urls", f"grpc://{generation.address}", "--backend", "vllm", "--history-backend", "none"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    root = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 120
        while not _has_tokenizer(root):
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < until, log.read_text(errors="replace")[-3000:]
            time.sleep(0.2)
        yield root
    finally:
        process.kill()
        process.wait()


def _has_tokenizer(root: str) -> bool:
    try:
        with urllib.request.urlopen(f"{root}/v1/tokenizers", timeout=5) as answer:
            return any(one["name"] == MODEL for one in json.load(answer)["tokenizers"])
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def ask(root: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{root}{path}",
        json.dumps({"model": MODEL, "temperature": 0, "max_tokens": 24, **body}).encode(),
        {"content-type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=120)


def test_a_completion_is_our_own_answer(gateway: str, own: Client) -> None:
    expected = own.generate(TEXT, max_new_tokens=24)
    with ask(gateway, "/v1/completions", prompt=TEXT) as answer:
        told = json.load(answer)
    assert told["choices"][0]["text"] == expected.text
    assert told["choices"][0]["finish_reason"] == "stop"
    usage = expected.finished.usage
    assert told["usage"]["prompt_tokens"] == usage.prompt_tokens
    assert told["usage"]["completion_tokens"] == usage.completion_tokens


def test_a_chat_is_our_own_answer_streamed_or_not(gateway: str, own: Client) -> None:
    expected = own.generate(MESSAGES, max_new_tokens=24).text
    with ask(gateway, "/v1/chat/completions", messages=MESSAGES) as answer:
        assert json.load(answer)["choices"][0]["message"]["content"] == expected
    with ask(gateway, "/v1/chat/completions", messages=MESSAGES, stream=True) as answer:
        events = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: ")]
    pieces = [json.loads(one) for one in events if one.strip() != b"[DONE]"]
    text = "".join(choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"])
    assert text == expected


def test_a_caller_of_smg_who_leaves_frees_the_request(gateway: str, generation: Process) -> None:
    answer = ask(gateway, "/v1/completions", prompt=TEXT, stream=True, max_tokens=3000, ignore_eos=True)
    assert answer.readline()
    answer.close()
    wait_idle(generation.address)


def test_sixteen_of_smgs_streams_are_one_answer(gateway: str, own: Client) -> None:
    # The model itself would end after a few.
    expected = own.generate(TEXT, max_new_tokens=24, ignore_eos=True).text
    texts: list[str] = []

    def complete() -> None:
        with ask(gateway, "/v1/completions", prompt=TEXT, ignore_eos=True) as answer:
            texts.append(json.load(answer)["choices"][0]["text"])

    threads = [threading.Thread(target=complete) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 16


def test_our_router_has_the_same_answers_by_vllms_protocol(
    tokenizer: Process, generation: Process, own: Client
) -> None:
    process = router(tokenizer, f"vllm://{generation.address}")
    try:
        with Client(process.address) as client:
            for options in (
                {"max_new_tokens": 24},
                {"max_new_tokens": 24, "top_logprobs": 2},
                {"max_new_tokens": 24, "ignore_eos": True, "repetition_penalty": 1.3},
                {"max_new_tokens": 40, "stop_strings": ["."]},
            ):
                assert client.generate(TEXT, **options).text == own.generate(TEXT, **options).text
        wait_idle(generation.address)
    finally:
        process.kill()
