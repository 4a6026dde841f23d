"""A server without file descriptors: it waits, says so once, serves what it has, and goes on when there are some."""

from __future__ import annotations

import subprocess
import sys

from factories.source_tree import ROOT

_PROGRAM = """
import asyncio, os, resource, socket, sys, time
from factories.servers.tiny_service import AsyncioConfig, tiny
from penstock.common.config import ChannelConfig
from penstock.http2.channel import Http2Channel
from penstock.v1 import tokenizer_pb2, tokenizer_pb2_grpc


async def ask(channel):
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    return (await stub.GetTokenizer(tokenizer_pb2.GetTokenizerRequest())).vocab_size


async def main():
    async with tiny(AsyncioConfig()) as (_, running, _):
        channel = Http2Channel(running.address, ChannelConfig(), timeout=60.0)
        assert await ask(channel) == 7
        host, _, port = running.address.rpartition(":")
        loop = asyncio.get_running_loop()
        # The other ends of connections need descriptors of the same process: they are made first.
        sockets = [socket.socket() for _ in range(64)]
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        spare = []
        try:
            while True:
                spare.append(os.dup(0))
        except OSError:
            pass
        for one in sockets:
            one.setblocking(False)
            await loop.sock_connect(one, (host, int(port)))
        began, used = time.monotonic(), time.process_time()
        while time.monotonic() < began + 1.5:
            assert await ask(channel) == 7
            await asyncio.sleep(0.05)
        print("cpu", time.process_time() - used)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        late = Http2Channel(running.address, ChannelConfig(), timeout=60.0)
        assert await ask(late) == 7
        print("served")
        late.close()
        channel.close()
        for one in sockets:
            one.close()


asyncio.run(main())
"""


def test_without_descriptors_it_waits_and_says_so_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=ROOT / "tests", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith("cpu "))
    assert "served" in done.stdout
    assert float(lines["cpu"]) < 1.0
    assert (done.stdout + done.stderr).count("cannot be accepted") == 1
    assert "out of system resource" not in done.stderr
