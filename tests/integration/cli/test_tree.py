"""`penstock serve` as a process tree: it starts together, is ready together and ends together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import factories.servers.tiny_service
import psutil
import pytest
from factories.servers.stack import free_port
from factories.wire.conversation import user
from penstock.cli.progress_display import WORDS
from penstock.common.ports import NEXT_METRICS_PORTS, ROUTER_METRICS_PORT
from penstock_client import AsyncClient

TLS_FILES = Path(factories.servers.tiny_service.__file__).parent / "tls"
SMALL = ("--kv-memory", "64MiB", "--threads", "1", "--port", "0", "--metrics-port", "0")
MAX_LINES = 15
# Of the router's metrics, where none is given.
PORTS = (ROUTER_METRICS_PORT, *NEXT_METRICS_PORTS)
ROLES = ["generation", "router", "tokenizer"]


class Tree:
    """One `penstock serve` and its output."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def ready(self) -> str:
        """Read up to the READY line; return the router's address."""
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            self.lines.append(raw.decode().rstrip("\n"))
            if self.lines[-1].startswith("READY"):
                return next(word for word in self.lines[-1].split() if word.startswith("127.0.0.1:"))
        raise AssertionError("\n".join(self.lines))

    def members(self) -> list[psutil.Process]:
        """Processes below the supervisor."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def role(self, name: str) -> psutil.Process:
        """The child that serves `name`."""
        return next(child for child in psutil.Process(self.process.pid).children() if name in child.cmdline())

    async def end(self) -> int:
        """Wait for and return the exit code."""
        return await self.process.wait()


@contextlib.asynccontextmanager
async def serve(*flags: str) -> AsyncIterator[Tree]:
    """A tree on free ports; nothing of it is left afterwards."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli.main", "serve", *SMALL, *flags), stdout=PIPE, stderr=PIPE
    )
    tree = Tree(process)
    try:
        yield tree
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def gone(processes: list[psutil.Process]) -> bool:
    """True when all of them end within a generous time."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 60)
    return not alive


async def test_a_tree_is_ready_serves_and_lets_streams_finish_when_stopped() -> None:
    async with serve("--drain-grace-seconds", "120") as tree:
        address = await tree.ready()
        # A busy machine may show progress besides.
        words = tuple(text.partition("{")[0] for pair in WORDS.values() for text in pair)
        assert len([line for line in tree.lines if not line.startswith(words)]) <= MAX_LINES
        assert sorted(line.partition(":")[0] for line in tree.lines if ": ready on " in line) == ROLES
        members = tree.members()
        async with AsyncClient(address) as client:
            stream = client.stream(user("Count from 1 to 20."), max_new_tokens=400, ignore_eos=True)
            await anext(stream)
            tree.process.send_signal(signal.SIGTERM)
            completion = await stream.result()
        assert completion.usage.completion_tokens == 400
        assert await tree.end() == 0
        assert await gone(members)


@pytest.mark.slow
async def test_a_tree_with_tls_has_a_gateway_with_tls() -> None:
    ca, cert, key = (str(TLS_FILES / name) for name in ("ca.pem", "server.pem", "server.key"))
    flags = ("--tls-cert", cert, "--tls-key", key, "--channel-tls-ca", ca, "--http-port", "0")
    async with serve("--dtype", "float32", *flags) as tree:
        await tree.ready()
        shown = next(line for line in tree.lines if line.startswith("READY"))
        where = shown.partition("HTTP ")[2].partition(" ")[0]
        assert where.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=ca)
        answer = await asyncio.to_thread(urllib.request.urlopen, f"{where}/models", context=trusted, timeout=60)
        with answer:
            assert json.load(answer)["data"][0]["id"] == "penstock-demo"


@pytest.mark.slow
async def test_a_tree_tells_the_state_of_its_engine_by_signal_and_by_command() -> None:
    async with serve() as tree:
        await tree.ready()
        tree.role("generation").send_signal(signal.SIGUSR1)
        assert tree.process.stderr is not None
        async for line in tree.process.stderr:
            if b"engine state" in line:
                break
        else:
            raise AssertionError("no state was logged")
        address = next(line.split()[3] for line in tree.lines if line.startswith("generation: ready on "))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli.main", "debug", "state", "--json", "--address", address), stdout=PIPE
        )
        stdout, _ = await process.communicate()
        assert json.loads(stdout)["running"] == []


async def test_a_tree_whose_child_dies_ends_with_its_exit_code() -> None:
    async with serve() as tree:
        await tree.ready()
        members = tree.members()
        tree.role("generation").kill()
        assert await tree.end() == 128 + signal.SIGKILL
        assert tree.process.stderr is not None
        assert b"generation ended unexpectedly with exit code 137" in await tree.process.stderr.read()
        assert await gone(members)


async def test_nothing_outlives_a_tree_that_is_killed() -> None:
    async with serve() as tree:
        await tree.ready()
        members = tree.members()
        tree.process.kill()
        await tree.end()
        assert await gone(members)


async def test_a_tree_that_is_stopped_while_it_loads_stops() -> None:
    async with serve() as tree:
        assert tree.process.stdout is not None
        await tree.process.stdout.readline()
        tree.process.send_signal(signal.SIGINT)
        assert await tree.end() == 0


async def test_a_child_that_cannot_start_is_one_line_that_names_the_flag() -> None:
    # In float32, which no CPU is warned of.
    async with serve("--kv-memory", "1KiB", "--dtype", "float32") as tree:
        assert await tree.end() == 2
        assert tree.process.stderr is not None
        shown = (await tree.process.stderr.read()).decode()
        assert "generation: --kv-memory" in shown
        assert len(shown.splitlines()) == 1


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
async def test_a_taken_port_is_reported_before_anything_is_loaded(flag: str) -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with taken, serve(flag, str(taken.sockets[0].getsockname()[1])) as tree:
        stdout, stderr = await tree.process.communicate()
        assert (tree.process.returncode, stdout) == (2, b"")
        assert flag.encode() in stderr


async def test_a_second_tree_with_the_flags_of_a_first_names_its_processes_and_the_flags_to_change() -> None:
    ports = ("--port", str(free_port()), "--http-port", str(free_port()))
    async with serve(*ports) as first:
        await first.ready()
        began = time.monotonic()
        async with serve(*ports) as second:
            stdout, stderr = await second.process.communicate()
        # Python's own start is most of it, on a machine with other work.
        assert time.monotonic() - began < 10
        assert (second.process.returncode, stdout) == (2, b"")
        (line,) = stderr.decode().splitlines()
        for role, port in (("router", ports[1]), ("gateway", ports[3])):
            assert re.search(rf"port {port} on 127\.0\.0\.1 is taken by penstock serve {role} \(process \d+\)", line)
        assert "give --port and --http-port other ones" in line


async def test_a_gateway_that_loses_its_port_during_the_start_names_the_flag_of_the_tree() -> None:
    """Two trees that start together find the port free."""
    port = free_port()
    async with serve("--http-port", str(port)) as tree:
        assert tree.process.stdout is not None
        # The ports were looked at.
        assert b"loading" in await tree.process.stdout.readline()
        with socket.create_server(("127.0.0.1", port)):
            stderr = (await tree.process.communicate())[1].decode()
        assert tree.process.returncode == 2
        assert f"gateway: port {port} on 127.0.0.1 is taken" in stderr
        assert "(change --http-port)" in stderr


async def test_a_second_tree_beside_a_first_has_the_next_free_port_for_its_metrics() -> None:
    """The usual one is also that of Prometheus's own exporter of machines."""
    async with serve("--metrics-port", "auto") as first, serve("--metrics-port", "auto") as second:
        pages: list[str] = []
        for tree in (first, second):
            await tree.ready()
            (line,) = [one for one in tree.lines if one.startswith("metrics: ")]
            (page,) = re.findall(rf"http://127\.0\.0\.1:(?:{'|'.join(map(str, PORTS))})/metrics", line)
            pages.append(page)
            answer = await asyncio.to_thread(urllib.request.urlopen, pages[-1], timeout=60)
            with answer:
                assert b"penstock_router_" in answer.read()
        ports = [int(page.removesuffix("/metrics").rpartition(":")[2]) for page in pages]
        assert len(set(ports)) == 2
        shown = [one for tree in (first, second) for one in tree.lines if one.startswith("metrics: ")]
        moved = f" (port {ROUTER_METRICS_PORT} is taken)"
        assert [one.endswith(moved) for one in shown] == [port != ROUTER_METRICS_PORT for port in ports]


async def test_the_demo_answers_shows_its_timings_and_leaves_nothing() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli.main", "demo"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        # A number format that no CPU is warned of.
        env={**os.environ, "PENSTOCK_DTYPE": "float32"},
    )
    stdout, stderr = await process.communicate()
    assert (process.returncode, stderr) == (0, b"")
    shown = stdout.decode()
    for word in ("What is Penstock?", "prefill", "decode", "detokenize", "router", "/metrics"):
        assert word in shown
    addresses = [word for word in shown.split() if word.startswith("127.0.0.1:")]
    assert len(addresses) == 4
    for address in addresses:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address.split(":"))


@contextlib.contextmanager
def importing(role: str) -> Iterator[subprocess.Popen[str]]:
    """A service as soon as Python runs our code, long before it could drain."""
    hook = "import signal, sys\nfrom penstock.cli import main\nrun = main._run\n"
    hook += "main._run = lambda debug: (print('begun', flush=True), run(debug))[1]\nmain.main()"
    command = [sys.executable, "-c", hook, "serve", role, "--port", "0", "--metrics-port", "-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process


@pytest.mark.parametrize("role", ["tokenizer", "generation", "router"])
def test_a_service_that_is_stopped_while_it_imports_exits_0(role: str) -> None:
    with importing(role) as process:
        process.terminate()
        assert process.stderr is not None
        assert process.wait() == 0, process.stderr.read()


@pytest.mark.parametrize("role", ["tokenizer", "generation", "router"])
def test_a_service_that_is_asked_for_its_state_while_it_imports_goes_on(role: str) -> None:
    with importing(role) as process:
        process.send_signal(signal.SIGUSR1)
        process.terminate()
        assert process.wait() == 0


def test_a_handler_of_sigusr1_that_is_there_stays() -> None:
    script = """
import signal, sys
from penstock.cli import main
seen = lambda *_: None
signal.signal(signal.SIGUSR1, seen)
sys.argv = ["penstock", "serve"]
main._run = lambda debug: 0 if signal.getsignal(signal.SIGUSR1) is seen else 3
main.main()
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


def test_a_stop_that_falls_into_a_callback_of_the_interpreter_is_not_lost() -> None:
    """Exceptions are printed there, and forgotten."""
    script = """
import os, signal, weakref
from penstock.cli import main
class Thing: pass
signal.signal(signal.SIGTERM, main._stop)
thing = Thing()
seen = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))
del thing
raise SystemExit("it went on")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
