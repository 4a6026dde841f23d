"""Real Penstock processes on free loopback ports, for end-to-end tests and benchmarks."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from factories.servers.forked import SWITCH
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.v1 import admin_pb2, admin_pb2_grpc

START_TIMEOUT = 300.0
_PROGRAM = ("-m", "penstock.cli.main")


_reserved: list[socket.socket] = []


def free_port() -> int:
    """Find a free loopback port that the kernel chooses for no other process while this one lives.

    A bound port is not chosen; since it does not listen, a server that reuses addresses, as ours do, can open it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    _reserved.append(reserved)
    return int(reserved.getsockname()[1])


def wait_serving(address: str, process: Process | None = None, timeout: float = START_TIMEOUT) -> None:
    """Block until the process at `address` reports SERVING. Raises RuntimeError with its output if it dies first."""
    deadline = time.monotonic() + timeout
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            if process is not None and process.popen.poll() is not None:
                raise RuntimeError(f"{process.name} exited with {process.popen.returncode}:\n{process.output()}")
            try:
                watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=2, wait_for_ready=True)
                if any(update.status == health_pb2.HealthCheckResponse.SERVING for update in watch):
                    return
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                    raise
    raise TimeoutError(f"{address} was not SERVING within {timeout:.0f} s:\n{process.output() if process else ''}")


def wait_idle(address: str) -> None:
    """Block until the generation service at `address` runs nothing and holds no block."""
    with grpc.insecure_channel(address) as channel:
        watch = admin_pb2_grpc.GenerationAdminServiceStub(channel).WatchLoad(admin_pb2.WatchLoadRequest(), timeout=30)
        assert any(not (report.load.running_requests or report.load.kv_blocks_used) for report in watch)
        watch.cancel()


@dataclass(slots=True)
class Process:
    """One service process; its output goes to a file."""

    name: str
    popen: subprocess.Popen[bytes]
    port: int
    metrics_port: int
    log: Path

    @property
    def address(self) -> str:
        """Address at which its gRPC server listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def metrics_address(self) -> str:
        """Address at which it serves metrics."""
        return f"127.0.0.1:{self.metrics_port}"

    def wait_ready(self) -> None:
        """Block until it is SERVING."""
        wait_serving(self.address, self)

    def output(self) -> str:
        """Return its output so far."""
        return self.log.read_text(errors="replace")

    def terminate(self, timeout: float = 130.0) -> int:
        """Send SIGTERM, wait, and return the exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(timeout)

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        self.popen.kill()
        self.popen.wait()


_FIXED = {
    # The cut of prompts, and with it the last bits of the logits, must be the same on every machine.
    "PENSTOCK_TUNE_SECONDS": "0",
    # A request that a busy machine makes slow must not be refused or cut off.
    "PENSTOCK_TEMPLATE_TIMEOUT_SECONDS": "60",
    "PENSTOCK_CONSTRAINT_COMPILE_SECONDS": "60",
    "PENSTOCK_DRAIN_GRACE_SECONDS": "120",
    # Several trees run at a time: a gateway is part of those that ask for it by flag.
    "PENSTOCK_HTTP_PORT": "-1",
}


@functools.cache
def _log_folder() -> str:
    """A folder for the logs of processes; it goes with this one."""
    folder = tempfile.mkdtemp(prefix="penstock-logs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def default_environment(more: dict[str, str]) -> dict[str, str]:
    """Return the environment of the tests without what they set to be quick: a user's, with `more`."""
    changed = {name for name in os.environ if name.startswith(("PENSTOCK_", "OMP_"))}
    return {name: value for name, value in os.environ.items() if name not in changed} | more


def start(
    role: str | None,
    *flags: str,
    environment: dict[str, str] | None = None,
    program: tuple[str, ...] = _PROGRAM,
    forked: bool = True,
    defaults: bool = False,
) -> Process:
    """Start `penstock serve [ROLE]` on free ports; does not wait for it to be ready. No role: the whole tree.

    With `defaults` no variable of the tests changes one of its defaults, and it is a new program.

    `program`: the program that Python runs in place of `penstock`. In tests `penstock` itself is forked where it can
    be, and so is what it starts, unless `forked` is False.
    """
    port, metrics_port = free_port(), free_port()
    name = role or "serve"
    log = Path(tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=_log_folder())[1])
    arguments = ["serve", *([role] if role else []), "--port", str(port)]
    # The gateway's metrics are on its only port.
    arguments += [*(["--metrics-port", str(metrics_port)] if role != "gateway" else []), *flags]
    if threading.current_thread() is threading.main_thread():
        # It dies with the thread that started it: the main one lives as long as the tests or the benchmark.
        arguments += ["--parent-pid", str(os.getpid())]
    variables = {**os.environ, **_FIXED, **(environment or {})}
    if defaults:
        variables = default_environment(environment or {})
    elif not forked:
        variables[SWITCH] = "0"
    with log.open("wb") as out:
        command = [sys.executable, *program, *arguments]
        popen = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=variables)
    return Process(name, popen, port, metrics_port, log)


async def penstock(*arguments: str, stdin: str = "", **variables: str) -> tuple[int, str, str]:
    """Run a command of `penstock`; return its exit code, standard output and standard error. It is forked as services
    are."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, *_PROGRAM, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT,
        env={**os.environ, **variables},
    )
    return done.returncode, done.stdout, done.stderr


@dataclass(slots=True)
class Stack:
    """Stack of tokenizer, generation × `backends` and router as processes, ready on entry, gone on exit."""

    backends: int = 1
    model: Path | None = None
    generation_flags: tuple[str, ...] = ("--kv-memory", "64MiB", "--threads", "1")
    router_flags: tuple[str, ...] = ()
    tokenizer: Process = field(init=False)
    generations: list[Process] = field(init=False, default_factory=list)
    router: Process = field(init=False)

    def __enter__(self) -> Self:
        try:
            self._start()
            for process in self.processes:
                wait_serving(process.address, process)
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        model = (str(self.model),) if self.model else ()
        self.tokenizer = start("tokenizer", *model)
        for _ in range(self.backends):
            self.generations.append(start("generation", *model, *self.generation_flags))
        backends = [flag for process in self.generations for flag in ("--backend", process.address)]
        self.router = start("router", "--tokenizer", self.tokenizer.address, *backends, *self.router_flags)

    @property
    def processes(self) -> list[Process]:
        """Every process that was started, backends first."""
        others = (getattr(self, name, None) for name in ("tokenizer", "router"))
        return [*self.generations, *(process for process in others if process is not None)]

    @property
    def address(self) -> str:
        """Address of the router, which clients connect to."""
        return self.router.address

    def stop(self) -> None:
        """Kill processes that still run."""
        for process in self.processes:
            if process.popen.poll() is None:
                process.kill()
            process.log.unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
