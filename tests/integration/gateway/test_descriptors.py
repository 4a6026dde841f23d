"""A gateway's process without file descriptors: it says so once, and goes on when there are some."""

from __future__ import annotations

import subprocess
import sys

from factories.source_tree import ROOT

_PROGRAM = """
import asyncio, os, resource, signal, socket
from penstock.gateway.app import GatewayApp
from penstock.gateway.config import GatewayConfig
from penstock.http2.listener import Listener
from penstock.serving.server import run_until_stopped
from prometheus_client import CollectorRegistry

SOFT, HARD = resource.getrlimit(resource.RLIMIT_NOFILE)


async def flood(where):
    loop = asyncio.get_running_loop()
    pause, pauses, often = Listener._pause, [], asyncio.Event()

    def noted(self, error):
        pauses.append(error)
        pause(self, error)
        if len(pauses) == 4:
            often.set()

    Listener._pause = noted
    # The other ends of connections need descriptors of the same process: they are made first.
    ends = [socket.socket() for _ in range(32)]
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, HARD))
    spare = []
    try:
        while True:
            spare.append(os.dup(0))
    except OSError:
        pass
    for end in ends:
        end.setblocking(False)
        await loop.sock_connect(end, where)
    await often.wait()
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))
    ends[0].send(b"GET /healthz HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n")
    print("answer", (await loop.sock_recv(ends[0], 12)).decode())
    os.kill(os.getpid(), signal.SIGTERM)


async def main():
    tasks = []

    def listening(addresses):
        host, _, port = addresses.grpc.rpartition(":")
        tasks.append(asyncio.create_task(flood((host, int(port)))))

    config = GatewayConfig(port=0, router="127.0.0.1:9")
    app = GatewayApp(config, CollectorRegistry())
    code = await run_until_stopped(app, config, on_listening=listening)
    await tasks[0]
    print("code", code)


asyncio.run(main())
"""


def test_without_descriptors_connections_wait_and_the_log_says_so_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=ROOT / "tests", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith(("answer", "code"))] == ["answer HTTP/1.1 200", "code 0"]
    assert (done.stdout + done.stderr).count("cannot be accepted") == 1
    assert "unhandled error" not in done.stdout + done.stderr
