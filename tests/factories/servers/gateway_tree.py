"""Gateway as a process of its own behind bearer tokens: a real router and tokenizer, and a backend that emits ids."""

from __future__ import annotations

import contextlib
import os
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from factories.servers import stack
from factories.source_tree import ROOT
from penstock.v1 import tokenizer_pb2, tokenizer_pb2_grpc

TOKEN = "open-sesame"
TLS_FILES = Path(__file__).parent / "tls"
CA = str(TLS_FILES / "ca.pem")
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class GatewayTree:
    """A ready one. Its router lets those in alone who show TOKEN."""

    gateway: stack.Process
    is_tls: bool

    @property
    def address(self) -> str:
        """host:port of the gateway."""
        return self.gateway.address

    @property
    def tls(self) -> ssl.SSLContext | None:
        """Context of its clients; None where it speaks plain HTTP."""
        return ssl.create_default_context(cafile=CA) if self.is_tls else None

    @property
    def process(self) -> psutil.Process:
        """The gateway's process. Raises psutil.Error where it has ended."""
        return psutil.Process(self.gateway.popen.pid)

    @property
    def rss_bytes(self) -> int:
        """Memory of the gateway's process."""
        return int(self.process.memory_info().rss)

    @property
    def log_bytes(self) -> int:
        """Length of what the gateway has written so far."""
        return self.gateway.log.stat().st_size

    @property
    def is_running(self) -> bool:
        """False once the gateway has ended."""
        return self.gateway.popen.poll() is None

    def health(self, timeout: float = 10.0) -> int:
        """Status of /health, on a connection of its own; 0 where none is to be had."""
        url = f"http{'s' * self.is_tls}://{self.address}/health"
        try:
            with urllib.request.urlopen(url, timeout=timeout, context=self.tls) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


@contextlib.contextmanager
def _killing(process: stack.Process | subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait() if isinstance(process, subprocess.Popen) else process.log.unlink(missing_ok=True)


def _fingerprint(tokenizer: str) -> str:
    with grpc.insecure_channel(tokenizer) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        return str(stub.GetTokenizer(tokenizer_pb2.GetTokenizerRequest()).tokenizer_fingerprint)


def _emitting(
    tokenizer: str, tokens: int, step_seconds: float, max_context: int
) -> tuple[subprocess.Popen[bytes], str]:
    address = f"127.0.0.1:{stack.free_port()}"
    flags = ["--port", address.rpartition(":")[2], "--tokens", str(tokens), "--step-seconds", str(step_seconds)]
    command = [sys.executable, "-m", "factories.servers.emitting_backend", *flags]
    command += ["--fingerprint", _fingerprint(tokenizer), "--max-context", str(max_context)]
    paths = os.pathsep.join(str(ROOT / part) for part in ("services", "tests"))
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.DEVNULL), address


@contextlib.contextmanager
def gateway_tree(
    *flags: str,
    is_tls: bool = False,
    tree: Path | None = None,
    tokens: int = 4096,
    step_seconds: float = 0.02,
    max_context: int = 1 << 22,
) -> Iterator[GatewayTree]:
    """Run one with default flags but `flags` for the gateway; `tree`: the source tree that the gateway is of.

    `max_context`: most tokens of a prompt and its answer; where nothing may end an answer before, it has all of them.
    """
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-gateway-")))
        (folder / "tokens").write_text(TOKEN + "\n", encoding="utf-8")
        tokenizer = stack.start("tokenizer")
        exits.enter_context(_killing(tokenizer))
        tokenizer.wait_ready()
        backend, address = _emitting(tokenizer.address, tokens, step_seconds, max_context)
        exits.enter_context(_killing(backend))
        guarded = ("--tokenizer", tokenizer.address, "--backend", address, "--auth-token-file", str(folder / "tokens"))
        router = stack.start("router", *guarded)
        exits.enter_context(_killing(router))
        router.wait_ready()
        secured = ("--tls-cert", str(TLS_FILES / "server.pem"), "--tls-key", str(TLS_FILES / "server.key"))
        environment = {} if tree is None else {"PYTHONPATH": _paths(tree)}
        given = ("--router", router.address, *(secured if is_tls else ()), *flags)
        gateway = stack.start("gateway", *given, environment=environment, forked=tree is None)
        exits.enter_context(_killing(gateway))
        ready = GatewayTree(gateway, is_tls)
        _wait_healthy(ready)
        yield ready


def _paths(tree: Path) -> str:
    return os.pathsep.join(str(tree / part) for part in ("services", "clients/python"))


def _wait_healthy(tree: GatewayTree) -> None:
    end = time.monotonic() + stack.START_TIMEOUT
    while tree.health(1.0) != 200:
        if not tree.is_running or time.monotonic() > end:
            raise RuntimeError(f"the gateway did not become ready:\n{tree.gateway.output()}")
        time.sleep(_POLL_SECONDS)
