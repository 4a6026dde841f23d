"""A serving process takes the descriptors that it may have."""

from __future__ import annotations

import subprocess
import sys

from factories.source_tree import ROOT

_PROGRAM = """
import asyncio, os, resource, signal
from factories.servers.tiny_service import AsyncioConfig, TinyService
from penstock.serving.server import run_until_stopped
from prometheus_client import CollectorRegistry


async def main():
    stop = lambda _: os.kill(os.getpid(), signal.SIGTERM)
    await run_until_stopped(TinyService(), AsyncioConfig(), registry=CollectorRegistry(), on_ready=stop)


resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
asyncio.run(main())
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_becomes_the_hard_one() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("(512, 512)")
