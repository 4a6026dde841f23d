"""gRPC's implementations in other languages on both transports of the router (the programs are in tests/clients)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factories.servers.stack import Stack, wait_idle
from factories.wire.conversation import user
from google.rpc import error_details_pb2, status_pb2
from penstock.v1 import common_pb2, text_pb2
from penstock_client import Client

pytestmark = pytest.mark.clients
SOURCES = Path(__file__).resolve().parents[1] / "clients"
QUESTION = "What is Penstock?"
OK, CANCELLED, INVALID_ARGUMENT, DEADLINE_EXCEEDED = 0, 1, 3, 4
JARS = ("grpc-*", "netty-*", "guava", "failureaccess", "perfmark*")


def chat(max_new_tokens: int, *, ignore_eos: bool = False) -> text_pb2.ChatRequest:
    request = text_pb2.ChatRequest()
    request.messages.add(role="user", content=QUESTION)
    request.config.max_new_tokens = max_new_tokens
    request.stop.ignore_eos = ignore_eos
    return request


def build_go(folder: Path) -> list[str]:
    program, environment = folder / "client", {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode"}
    run(["go", "build", "-o", str(program), str(SOURCES / "go/main.go")], GOCACHE=str(folder / "cache"), **environment)
    return [str(program)]


def build_java(folder: Path) -> list[str]:
    jars = ":".join(str(jar) for name in JARS for jar in sorted(Path("/usr/share/java").glob(f"{name}.jar")))
    run(["javac", "-cp", jars, "-d", str(folder), str(SOURCES / "java/Main.java")])
    return ["java", "-cp", f"{folder}:{jars}", "Main"]


def build_cpp(folder: Path) -> list[str]:
    program = folder / "client"
    flags = run(["pkg-config", "--cflags", "--libs", "grpc++", "protobuf"]).split()
    run(["g++", "-std=c++17", "-O0", str(SOURCES / "cpp/main.cpp"), "-o", str(program), *flags])
    return [str(program)]


def build_ruby(folder: Path) -> list[str]:
    return ["ruby", str(SOURCES / "ruby/main.rb")]


BUILDS = {"go": build_go, "javac": build_java, "g++": build_cpp, "ruby": build_ruby}


def run(command: list[str], **environment: str) -> str:
    """Run the program and return its output, which a failure shows."""
    variables = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module", params=list(BUILDS))
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param}; last run recorded in docs/learn/testing.md")
    return BUILDS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["grpc", "asyncio"])
def server(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with Stack(router_flags=("--transport", request.param)) as running:
        yield running


def messages(path: Path) -> list[bytes]:
    data, found = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:4], "big")
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found


def field_of(details: bytes) -> str:
    status = status_pb2.Status.FromString(details)
    request = error_details_pb2.BadRequest()
    assert any(detail.Unpack(request) for detail in status.details)
    return request.field_violations[0].field


def test_calls_end_as_they_should(server: Stack, program: list[str], tmp_path: Path) -> None:
    score = text_pb2.ScoreTextRequest()
    score.items.add(prompt="The capital of France is", continuation=" Paris")
    requests: dict[str, Any] = {"chat": chat(64), "long": chat(600, ignore_eos=True), "bad": chat(0), "score": score}
    for name, request in requests.items():
        (tmp_path / name).write_bytes(request.SerializeToString())
    lines = run([*program, server.address, str(tmp_path)]).splitlines()
    assert dict(line.split() for line in lines) == {
        "chat": str(OK),
        "cancel": str(CANCELLED),
        "deadline": str(DEADLINE_EXCEEDED),
        "error": str(INVALID_ARGUMENT),
        "score": str(OK),
        "many": str(OK),
    }
    answer = [text_pb2.ChatResponse.FromString(message) for message in messages(tmp_path / "chat.out")]
    with Client(server.address) as client:
        expected = client.generate(user(QUESTION), max_new_tokens=64)
    assert "".join(event.delta.text for event in answer) == expected.text
    assert answer[-1].finished.sequences[0].finish_reason == common_pb2.FINISH_REASON_STOP_EOS
    assert field_of(messages(tmp_path / "error.out")[0]) == "config.max_new_tokens"
    scored = text_pb2.ScoreTextResponse.FromString(messages(tmp_path / "score.out")[0])
    assert scored.results[0].logprob < 0
    # Requests that were cancelled or late are not computed any further.
    wait_idle(server.generations[0].address)
