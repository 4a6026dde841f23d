"""The processes of benchmarks/wire.py: the variants, the backends that emit at will, and the client."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from factories.servers import stack
from penstock.common.checkpoint import demo_folder
from penstock.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

from benchmarks import _wire_smg
from benchmarks._wire_protocols import MODEL

_ROOT = Path(__file__).resolve().parents[1]
MODES = ("uncoalesced", "coalesced")
SLOTS = 4096
# smg by HTTP/2 and by HTTP/1.1.
SMG, SMG_1, GATEWAY = "smg", "smg1", "gateway"
_START_SECONDS, _LOOK_SECONDS = 60.0, 0.05
_TOKEN_CHARS = 4


@dataclass(frozen=True)
class Side:
    """The carrier of a variant's tokens in one mode: the client's address and protocol, and the processes."""

    address: str
    protocol: str
    pids: dict[str, int]


@dataclass(frozen=True)
class Variant:
    """A serving layer of its own before a backend of each mode."""

    name: str
    sides: dict[str, Side]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children."""
    process = psutil.Process(pid)
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def memory_mb(pid: int) -> float:
    """RSS of a process and its children, MB of 10^6 bytes."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)]) / 1e6


@dataclass(frozen=True)
class Answer:
    """The answer of every backend; its text has four characters a token, so that text tells the number of tokens."""

    ids: list[int]
    text: str
    fingerprint: str


def make_answer(address: str, tokens: int) -> Answer:
    """An answer by the tokenizer at `address`, of ASCII that JSON writes as it is."""
    with grpc.insecure_channel(address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        info = stub.GetTokenizer(tokenizer_pb2.GetTokenizerRequest())
        found: list[tuple[int, str]] = []
        for begin in range(0, min(info.vocab_size, 8192), 256):
            ids = range(begin, min(begin + 256, info.vocab_size))
            request = tokenizer_pb2.DecodeRequest(sequences=[common_pb2.TokenIds(ids=[one]) for one in ids])
            found += [(one, text) for one, text in zip(ids, stub.Decode(request).texts, strict=True) if _is_plain(text)]
    if not found:
        raise SystemExit("the tokenizer has no token of four ASCII characters")
    chosen = [found[place % len(found)] for place in range(tokens)]
    return Answer([one for one, _ in chosen], "".join(text for _, text in chosen), info.tokenizer_fingerprint)


def _is_plain(text: str) -> bool:
    return len(text) == _TOKEN_CHARS and text.isascii() and text.isprintable() and not set(text) & set('"\\')


def wait_ready(gateway: stack.Process) -> None:
    """Return when its router is ready. Raises SystemExit with its output if it does not come to that."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and gateway.popen.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{gateway.address}/readyz", timeout=5):
            return
        time.sleep(_LOOK_SECONDS)
    raise SystemExit(f"the gateway did not get ready:\n{gateway.output()}")


class Processes:
    """Started as they are asked for; gone when `exits` is closed."""

    def __init__(self, arguments: argparse.Namespace, exits: contextlib.ExitStack) -> None:
        self._arguments = arguments
        self._exits = exits
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-wire-")))
        self._counters = folder / "received"
        self._counters.write_bytes(bytes(8 * SLOTS))
        self._answer: Answer | None = None
        self._backends: dict[str, tuple[int, str]] = {}

    @property
    def answer(self) -> Answer:
        """Known once there is a variant."""
        assert self._answer is not None
        return self._answer

    def client(self) -> subprocess.Popen[bytes]:
        """The load client; it works by lines on its pipes."""
        flags = ("--token-chars", str(_TOKEN_CHARS))
        return self._script("_wire_client.py", *flags, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _script(self, name: str, *flags: str, **settings: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(_ROOT / "benchmarks" / name), "--counters", str(self._counters), *flags]
        process = subprocess.Popen(command, **settings)
        self._exits.callback(process.wait)
        self._exits.callback(process.kill)
        return process

    def _backend(self, script: str, mode: str, *flags: str) -> tuple[int, str]:
        """Its pid and address."""
        port = stack.free_port()
        window = self.window(mode)
        given = ["--port", str(port), "--ids", json.dumps(self.answer.ids), "--window", str(window), *flags]
        given += ["--parent-pid", str(os.getpid()), "--step-seconds", str(self._arguments.step_seconds)]
        if mode == "coalesced":
            given += ["--interval", str(self._arguments.interval)]
        return self._script(script, *given).pid, f"127.0.0.1:{port}"

    def window(self, mode: str) -> int:
        """Tokens of a stream that may be on their way; 0: any number."""
        return int(self._arguments.window if mode == "uncoalesced" else self._arguments.coalesced_window)

    def variant(self, text: str) -> Variant:
        """`NAME=FLAGS` or `NAME=@DIR`, ready."""
        name, _, flags = text.partition("=")
        other = flags.removeprefix("@") if flags.startswith("@") else ""
        folder = Path(other) if other else _ROOT
        environment = _environment(folder)
        flags, _, more = ("", "", "") if other else flags.partition("//")
        given = shlex.split(f"{self._arguments.tokenizer_flags} {more}")
        tokenizer = self._service("tokenizer", *given, environment=environment)
        if self._answer is None:
            self._answer = make_answer(tokenizer.address, self._arguments.tokens)
            known = ("--fingerprint", self._answer.fingerprint)
            self._backends = {mode: self._backend("_wire_backend.py", mode, *known) for mode in self._arguments.modes}
        sides = {}
        for mode, (backend, address) in self._backends.items():
            where = ("--tokenizer", tokenizer.address, "--backend", address)
            router = self._service("router", *where, *shlex.split(flags), environment=environment)
            pids = {"router": router.popen.pid, "tokenizer": tokenizer.popen.pid, "backend": backend}
            sides[mode] = Side(router.address, "grpc", pids)
        return Variant(name, sides)

    def _service(self, role: str, *flags: str, environment: dict[str, str]) -> stack.Process:
        process = stack.start(role, *flags, environment=environment)
        self._exits.callback(process.log.unlink, missing_ok=True)
        self._exits.callback(process.kill)
        process.wait_ready()
        return process

    def gateway(self, text: str) -> Variant:
        """Penstock's HTTP gateway before a router and tokenizer of its own, ready. After a first `variant`.

        `text`: NAME=FLAGS, or NAME=@DIR for the gateway of another checkout.
        """
        name, _, flags = text.partition("=")
        other, given = (flags[1:], []) if flags.startswith("@") else ("", shlex.split(flags))
        sides = {}
        for mode, side in self.variant(name).sides.items():
            where = _environment(Path(other) if other else _ROOT)
            gateway = stack.start("gateway", "--router", side.address, *given, environment=where)
            self._exits.callback(gateway.log.unlink, missing_ok=True)
            self._exits.callback(gateway.kill)
            wait_ready(gateway)
            sides[mode] = Side(gateway.address, "sse1", {"gateway": gateway.popen.pid, **side.pids})
        return Variant(name, sides)

    def smg(self) -> list[Variant]:
        """The smg gateway before a worker that emits the same at the same pace, ready, by both versions of HTTP.

        After a first `variant`.
        """
        served = ("--model", MODEL, "--tokenizer", str(demo_folder()))
        sides = {}
        for mode in self._arguments.modes:
            worker, address = self._backend("_wire_smg_worker.py", mode, *served)
            stack.wait_serving(address)
            gateway = _wire_smg.start(address, MODEL, shlex.split(self._arguments.smg_flags))
            self._exits.callback(gateway.log.unlink, missing_ok=True)
            self._exits.callback(gateway.process.wait)
            self._exits.callback(gateway.process.kill)
            gateway.wait_ready()
            sides[mode] = Side(gateway.address, "sse", {"gateway": gateway.process.pid, "backend": worker})
        plain = {mode: Side(side.address, "sse1", side.pids) for mode, side in sides.items()}
        return [Variant(SMG, sides), Variant(SMG_1, plain)]


def _environment(folder: Path) -> dict[str, str]:
    """Variables by which a process runs the packages of a checkout."""
    return {"PYTHONPATH": os.pathsep.join(str(folder / part) for part in ("services", "clients/python"))}
