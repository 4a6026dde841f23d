"""Services can be explored and called with a generic client that knows only their addresses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from factories.servers.stack import Process, Stack

BUF = shutil.which("buf") or str(Path(sys.executable).parent / "buf")
SERVICES = {
    "tokenizer": {"penstock.v1.TokenizerService"},
    "generation": {"penstock.v1.GenerationService", "penstock.v1.ModelService", "penstock.v1.GenerationAdminService"},
    "router": {"penstock.v1.TextService", "penstock.v1.RouterAdminService", "inference.GRPCInferenceService"},
}


def buf_curl(process: Process, *arguments: str) -> str:
    """Run `buf curl` against a process, with server reflection as its only schema."""
    url = f"http://{process.address}"
    target = [argument.replace("URL", url) for argument in arguments]
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def process_of(stack: Stack, role: str) -> Process:
    """The first process of a role."""
    return next(process for process in stack.processes if process.name == role)


@pytest.mark.parametrize("role", sorted(SERVICES))
def test_buf_curl_lists_the_services_of_each_process(stack: Stack, role: str) -> None:
    """The health service beside our own."""
    listed = buf_curl(process_of(stack, role), "--list-services", "URL")
    assert set(listed.split()) >= SERVICES[role] | {"grpc.health.v1.Health"}


def test_buf_curl_encodes_text_at_the_tokenizer(stack: Stack) -> None:
    """A unary call made from reflection alone."""
    answer = buf_curl(stack.tokenizer, "-d", '{"texts": ["Hello"]}', "URL/penstock.v1.TokenizerService/Encode")
    assert json.loads(answer)["encodings"][0]["ids"]


def test_buf_curl_reads_the_model_of_a_backend(stack: Stack) -> None:
    """The model's geometry by reflection."""
    answer = json.loads(buf_curl(stack.generations[0], "-d", "{}", "URL/penstock.v1.ModelService/GetModelInfo"))
    assert answer["modelType"] == "qwen2"
    assert answer["kv"]["numBlocks"] > 0


def test_buf_curl_streams_a_chat_at_the_router(stack: Stack) -> None:
    """A server stream: started first, finished last."""
    request = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "config": {"maxNewTokens": 16}})
    answer = buf_curl(stack.router, "-d", request, "URL/penstock.v1.TextService/Chat")
    decoder, events, position = json.JSONDecoder(), [], 0
    while position < len(answer.rstrip()):
        event, end = decoder.raw_decode(answer, position)
        events.append(event)
        position = end + len(answer[end:]) - len(answer[end:].lstrip())
    assert "started" in events[0]
    assert "finished" in events[-1]
