"""Health on a Unix socket: for checks inside the process's own container, whatever its TLS and credentials.

A caller connects and reads one line, SERVING or NOT_SERVING. `health_probe.py` is such a caller: it starts within
Python's own milliseconds, while a gRPC client takes half a second of processor time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Callable

from penstock.common.errors import StartupError

FLAG = "--health-socket"


class HealthSocket:
    """The listening socket. It belongs to one event loop: a hung loop does not answer, and that is an answer."""

    def __init__(self, path: str, is_serving: Callable[[], bool]) -> None:
        """Take the file's path; nothing is opened yet. `is_serving` is called for every caller."""
        self._path = os.path.expanduser(path)
        self._is_serving = is_serving
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen; replace a socket that a dead process left. Raises StartupError naming --health-socket."""
        try:
            self._remove_dead()
            self._server = await asyncio.start_unix_server(self._answer, self._path)
            # For the user that runs the service; other users of this machine have gRPC's own health.
            os.chmod(self._path, 0o600)
        except OSError as error:
            raise StartupError(f"{FLAG} {self._path}: {error.strerror or error}", flag=FLAG) from error

    async def close(self) -> None:
        """Stop answering and remove the file. It is safe to call twice."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # RuntimeError: of uvloop, where the caller has cut it off already.
        with contextlib.suppress(ConnectionError, RuntimeError):
            writer.write(b"SERVING\n" if self._is_serving() else b"NOT_SERVING\n")
            writer.close()
            await writer.wait_closed()

    def _remove_dead(self) -> None:
        try:
            mode = os.lstat(self._path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise StartupError(f"{FLAG} {self._path} exists and is not a socket", flag=FLAG)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(self._path)
            except ConnectionRefusedError:
                os.unlink(self._path)
                return
            except TimeoutError:
                pass
        raise StartupError(f"{FLAG} {self._path}: another process answers on it", flag=FLAG)
