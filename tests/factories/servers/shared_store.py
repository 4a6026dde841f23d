"""Server of Redis' protocol, for stores that several gateways share: a real one, on a free port."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
needs_shared_store = pytest.mark.skipif(
    PROGRAM is None, reason="no redis-server or valkey-server; last run recorded in docs/learn/testing.md"
)


class SharedStore:
    """A server that a test starts and ends."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """Choose a port; nothing runs yet."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._folder, self._arguments = folder, arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address for --response-store."""
        return f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        """Start it with nothing in it; return once it takes connections."""
        assert PROGRAM is not None
        command = [PROGRAM, "--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen(
            [*command, "--daemonize", "no", *self._arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self._process.stdout is not None
        said = iter(self._process.stdout.readline, b"")
        assert any(b"Ready to accept connections" in line for line in said), "the server ended"

    def kill(self) -> None:
        """End it at once; what it kept is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@contextmanager
def shared_store(folder: Path, *arguments: str) -> Iterator[SharedStore]:
    """Run a server, with further `arguments`."""
    store = SharedStore(folder, *arguments)
    try:
        store.start()
        yield store
    finally:
        store.kill()
