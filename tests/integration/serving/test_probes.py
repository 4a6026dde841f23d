"""Probes of a process beside gRPC: the health socket, /healthz, /readyz, and /metrics with credentials."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Hashable
from pathlib import Path
from socketserver import TCPServer
from types import SimpleNamespace

import factories.servers.tiny_service
import pytest
from factories.servers.tiny_service import tiny
from penstock.common.config import ServerConfig
from penstock.common.errors import StartupError
from penstock.serving import health_probe
from penstock.serving.metrics_callers import MetricsCallers
from penstock.serving.metrics_endpoint import start_metrics_server
from prometheus_client import CollectorRegistry

FILES = Path(factories.servers.tiny_service.__file__).parent / "tls"
CERT, KEY, CA = (str(FILES / name) for name in ("server.pem", "server.key", "ca.pem"))


def probe(path: str) -> tuple[int, str]:
    """Run the probe as a container's health check does."""
    command = [sys.executable, "-I", "-S", health_probe.__file__, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


def command_line(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("secure", ["plaintext", "TLS", "mTLS and a token"])
async def test_a_container_asks_its_service_whatever_its_credentials(
    secure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, token = str(tmp_path / "health.sock"), tmp_path / "token"
    token.write_text("abc\n")
    config = {
        "plaintext": ServerConfig(health_socket=path),
        "TLS": ServerConfig(health_socket=path, tls_cert=CERT, tls_key=KEY),
        "mTLS and a token": ServerConfig(
            health_socket=path, tls_cert=CERT, tls_key=KEY, tls_client_ca=CA, auth_token_file=str(token)
        ),
    }[secure]
    async with tiny(config) as (_, running, _):
        assert await asyncio.to_thread(probe, path) == (0, "SERVING")
        monkeypatch.setenv("PENSTOCK_HEALTH_SOCKET", path)
        assert await asyncio.to_thread(command_line, "health") == (0, "SERVING")
        await running.health.set_wanted(False)
        assert await asyncio.to_thread(probe, path) == (1, "NOT_SERVING")
    status, line = await asyncio.to_thread(probe, path)
    assert status == 1
    assert "No such file" in line


async def test_a_loop_that_hangs_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "health.sock")
    async with tiny(ServerConfig(health_socket=path)):
        monkeypatch.setattr(health_probe, "SECONDS", 0.1)
        # On the very thread of the loop, which so cannot answer meanwhile.
        assert health_probe.main([path]) == 1


async def test_a_socket_of_a_dead_process_is_replaced_and_one_of_a_living_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "health.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    config = ServerConfig(health_socket=path)
    async with tiny(config):
        assert await asyncio.to_thread(probe, path) == (0, "SERVING")
        with pytest.raises(StartupError, match="another process answers on it") as caught:
            async with tiny(config):
                pass
        assert caught.value.flag == "--health-socket"
        assert await asyncio.to_thread(probe, path) == (0, "SERVING")


async def test_a_file_in_the_sockets_place_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("mine")
    with pytest.raises(StartupError, match="--health-socket"):
        async with tiny(ServerConfig(health_socket=str(path))):
            pass
    assert path.read_text() == "mine"


def test_the_probe_imports_nothing_that_is_written_in_python() -> None:
    code = "import sys; before = set(sys.modules); "
    code += f"exec(compile(open({health_probe.__file__!r}).read(), 'probe', 'exec'), {{'__name__': 'probe'}}); "
    code += "print(sorted(name for name in set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['_socket']"


def get(url: str, **headers: str) -> tuple[int, bytes]:
    context = ssl.create_default_context(cafile=CA) if url.startswith("https") else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=context) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


async def test_pages_of_the_metrics_port() -> None:
    async with tiny() as (_, running, _):
        base = f"http://{running.addresses.metrics}"
        assert await asyncio.to_thread(get, base + "/healthz") == (200, b"ok\n")
        assert await asyncio.to_thread(get, base + "/readyz") == (200, b"ready\n")
        assert (await asyncio.to_thread(get, base + "/metrics"))[0] == 200
        for path in ("/", "/metrics/", "/favicon.ico", "/etc/passwd"):
            assert (await asyncio.to_thread(get, base + path))[0] == 404
        await running.health.set_wanted(False)
        assert await asyncio.to_thread(get, base + "/readyz") == (503, b"not ready\n")
        assert await asyncio.to_thread(get, base + "/healthz") == (200, b"ok\n")


async def test_metrics_need_the_token_where_calls_do_and_probes_do_not(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("abc\n")
    async with tiny(ServerConfig(auth_token_file=str(token))) as (_, running, _):
        base = f"http://{running.addresses.metrics}"
        for header in ({}, {"Authorization": "Bearer abd"}, {"Authorization": "Basic abc"}):
            status, body = await asyncio.to_thread(lambda given=header: get(base + "/metrics", **given))
            assert status == 401
            assert b"--auth-token-file" in body
        status, body = await asyncio.to_thread(lambda: get(base + "/metrics", Authorization="Bearer abc"))
        assert status == 200
        assert b"grpc_server" in body
        assert (await asyncio.to_thread(get, base + "/readyz"))[0] == 200


async def test_a_silent_caller_of_tls_holds_nobody_up() -> None:
    async with tiny(ServerConfig(tls_cert=CERT, tls_key=KEY)) as (_, running, _):
        host, _, port = (running.addresses.metrics or "").rpartition(":")
        with socket.create_connection((host, int(port))):
            status, _ = await asyncio.to_thread(get, f"https://{host}:{port}/metrics")
            assert status == 200


async def test_callers_that_drip_hold_nobody_up() -> None:
    async with tiny(ServerConfig(metrics_request_seconds=0.3)) as (_, running, _):
        host, _, port = (running.addresses.metrics or "").rpartition(":")

        async def drip() -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            ended = asyncio.ensure_future(reader.read())
            while not ended.done():
                # Each byte comes well before any read is over its time.
                writer.write(b"G")
                await asyncio.wait([ended], timeout=0.02)
            writer.close()
            with contextlib.suppress(ConnectionResetError):
                assert await ended == b""

        async with asyncio.timeout(60):
            await asyncio.gather(*(drip() for _ in range(running.config.metrics_max_connections)))
        assert (await asyncio.to_thread(get, f"http://{host}:{port}/readyz"))[0] == 200


async def test_more_connections_than_are_served_are_closed() -> None:
    async with tiny(ServerConfig(metrics_max_connections=3)) as (_, running, _):
        host, _, port = (running.addresses.metrics or "").rpartition(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(7)]
        closed = [asyncio.create_task(reader.read()) for reader, _ in held]
        # The first to end are those beyond the bound: the others have seconds to send a request.
        done: set[asyncio.Task[bytes]] = set()
        while len(done) < 4:
            done, _ = await asyncio.wait(closed, return_when=asyncio.FIRST_COMPLETED)
        assert all(task.result() == b"" for task in done)
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize("secure", [False, True], ids=["plaintext", "TLS"])
async def test_silent_connections_shut_out_no_probe(secure: bool) -> None:
    tls = {"tls_cert": CERT, "tls_key": KEY} if secure else {}
    async with tiny(ServerConfig(metrics_max_connections=3, **tls)) as (_, running, _):
        host, _, port = (running.addresses.metrics or "").rpartition(":")
        url = f"http{'s' * secure}://{'localhost' if secure else host}:{port}/healthz"
        held = []
        for _ in range(9):
            held.append(await asyncio.open_connection(host, int(port)))
            assert await asyncio.to_thread(get, url) == (200, b"ok\n")
        for _, writer in held:
            writer.close()


async def test_probes_beyond_a_share_of_the_processor_are_closed(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("abc\n")
    config = ServerConfig(auth_token_file=str(token), anonymous_cpu_share=0.001)
    async with tiny(config) as (_, running, _):
        url = f"http://{running.addresses.metrics}"

        def flood() -> int:
            for number in range(100_000):
                try:
                    get(url + "/healthz")
                except OSError:
                    return number
            return 0

        # What was saved up is for hundreds of probes, not for all.
        assert await asyncio.to_thread(flood) > 50


async def test_without_descriptors_the_port_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fails, waits, attempts = threading.Event(), [], []
    accept, sleep = TCPServer.get_request, time.sleep
    fails.set()

    def get_request(server: TCPServer) -> tuple[socket.socket, object]:
        attempts.append(1)
        if fails.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(server)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        fails.clear()
        sleep(seconds)

    monkeypatch.setattr(TCPServer, "get_request", get_request)
    monkeypatch.setattr(
        "penstock.serving.metrics_endpoint.time", SimpleNamespace(sleep=wait, thread_time=time.thread_time)
    )
    async with tiny() as (_, running, _):
        assert (await asyncio.to_thread(get, f"http://{running.addresses.metrics}/healthz"))[0] == 200
    assert (len(attempts), len(waits)) == (2, 1)
    assert waits[0] > 0.1


async def test_the_port_can_be_taken_again_at_once() -> None:
    async with tiny() as (_, running, _):
        port = int((running.addresses.metrics or "").rpartition(":")[2])
        # The side that closes first keeps the port for a minute: this one does.
        assert (await asyncio.to_thread(get, f"http://127.0.0.1:{port}/readyz"))[0] == 200
    for closing in [thread for thread in threading.enumerate() if thread.name == "metrics-close"]:
        closing.join()
    bound = start_metrics_server(CollectorRegistry(), "127.0.0.1", port, is_ready=lambda: True)
    bound.close()


@pytest.mark.parametrize("secure", [False, True], ids=["plaintext", "TLS"])
def test_a_caller_that_leaves_before_its_answer_leaves_no_line(secure: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """As Prometheus does where a process takes longer than its patience: stderr has JSON lines and nothing else."""
    config = ServerConfig(tls_cert=CERT, tls_key=KEY) if secure else None
    asked, left, answered = threading.Event(), threading.Event(), threading.Event()

    def is_ready() -> bool:
        asked.set()
        assert left.wait(60)
        return True

    class Told(MetricsCallers):
        def leave(self, connection: Hashable, network: str, seconds: float) -> None:
            super().leave(connection, network, seconds)
            answered.set()

    served = start_metrics_server(CollectorRegistry(), "127.0.0.1", 0, is_ready=is_ready, config=config)
    with contextlib.closing(served):
        served._server.callers = Told(4, None)
        plain = socket.create_connection(("127.0.0.1", served.port))
        caller = plain
        if secure:
            context = ssl.create_default_context(cafile=CA)
            context.check_hostname = False
            caller = context.wrap_socket(plain)
        caller.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
        assert asked.wait(60)
        # A reset: the next write of the other end fails.
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        caller.close()
        left.set()
        assert answered.wait(60)
    assert capfd.readouterr().err == ""
