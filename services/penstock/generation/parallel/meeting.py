"""Ranks that a launcher started find rank 0, by the launcher's store, and are its processes from then on.

The store holds the path of a socket in a folder of rank 0's user. What is said goes through that socket: who has no
place in the folder can neither take part nor give orders.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import weakref
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from penstock.common.errors import StartupError
from penstock.generation.parallel.group import PATIENCE
from penstock.generation.parallel.launch import Place

_KEY = "penstock/ranks"
_RANK = struct.Struct("<I")
# Of SO_PEERCRED: process, user, group.
_PEER = struct.Struct("iII")
# A window for messages of prompts, so that rank 0 computes while they are read.
_WINDOW = 1 << 20


class LaunchedProcess:
    """Process of a rank that is no child of this one: the part of Popen's interface that ranks need."""

    def __init__(self, pid: int) -> None:
        """Take it. Raises ProcessLookupError."""
        self.pid = pid
        self._end = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._end)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end, whose status only the launcher gets. Raises subprocess.TimeoutExpired."""
        if not select.select([self._end], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)

    def kill(self) -> None:
        """Kill it; no harm where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._end, signal.SIGKILL)


class Meeting:
    """Rank 0's side: a socket to which each other rank comes once."""

    def __init__(self, place: Place) -> None:
        """Open it, and tell its path. Raises StartupError naming MASTER_ADDR."""
        self._place = place
        self._wake, self._woken = os.pipe()
        # Those that came, and of them those that were not taken yet.
        self._numbers: set[int] = set()
        self._came: dict[int, tuple[LaunchedProcess, Connection]] = {}
        self._folder = tempfile.mkdtemp(prefix="penstock-meeting-")
        self._socket = socket.socket(socket.AF_UNIX)
        self._is_closed = False
        weakref.finalize(self, _release, self._folder, self._socket, self._wake)
        try:
            self._socket.bind(f"{self._folder}/ranks")
            self._socket.listen(place.count)
            # Kept: where the launcher has no store, it ends with this object.
            self._store = _store(place)
            self._store.set(_KEY, f"{self._folder}/ranks")
        except BaseException:
            self.close()
            raise

    def take(self, number: int, order: dict[str, Any]) -> tuple[LaunchedProcess, Connection]:
        """Wait for a rank, and send it its order. Raises StartupError."""
        deadline = time.monotonic() + PATIENCE.total_seconds()
        while number not in self._came:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._socket.fileno(), self._wake], [], [], left)
            if self._wake in ready:
                raise StartupError("the start was given up", flag="RANK")
            if not ready:
                raise StartupError(
                    f"rank {number} of {self._place.count} did not come within {PATIENCE.total_seconds():g} s: is it "
                    "started, with the same MASTER_ADDR and MASTER_PORT?",
                    flag="WORLD_SIZE",
                )
            self._let_in()
        process, connection = self._came.pop(number)
        connection.send_bytes(json.dumps(order).encode())
        return process, connection

    def _let_in(self) -> None:
        """Take whoever comes. Raises StartupError for a rank that came already."""
        came, _ = self._socket.accept()
        came.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WINDOW)
        connection = Connection(came.detach())
        pid = _process_behind(connection)
        try:
            # Its number is the first that it says, at once.
            (number,) = _RANK.unpack(connection.recv_bytes(_RANK.size))
            process = LaunchedProcess(pid)
        except (OSError, EOFError, struct.error):
            # It has ended already; if it was a rank, the launcher ends this process as well.
            connection.close()
            return
        if number in self._numbers or not 0 < number < self._place.count:
            raise StartupError(f"two processes of the launcher have RANK {number}", flag="RANK")
        self._numbers.add(number)
        self._came[number] = process, connection

    def close(self) -> None:
        """Let nobody in any more; a wait for a rank ends. Those that were not taken end. Again is no harm."""
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._woken)
        for _, connection in self._came.values():
            connection.close()


def _release(folder: str, listening: socket.socket, wake: int) -> None:
    listening.close()
    os.close(wake)
    shutil.rmtree(folder, ignore_errors=True)


def meet_rank_0(place: Place) -> tuple[Connection, int]:
    """Return the connection to rank 0 and the number of its process, once it is there. Raises StartupError."""
    path = _told(_store(place))
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(path)
    except OSError as error:
        raise StartupError(f"rank 0 cannot be reached at {path} ({error.strerror})", flag="MASTER_ADDR") from error
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WINDOW)
    connection = Connection(link.detach())
    # Orders name files to read: they are taken from this user alone.
    pid = _process_behind(connection)
    connection.send_bytes(_RANK.pack(place.rank))
    return connection, pid


def _store(place: Place) -> Any:
    """Return torch's store of the launcher, or this group's own. Raises StartupError naming MASTER_ADDR."""
    is_ours = place.rank == 0 and not place.is_store_there
    distributed: Any = dist
    try:
        return distributed.TCPStore(
            place.address, place.port, place.count, is_ours, PATIENCE, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError) as error:
        done = "be opened" if is_ours else "be reached"
        raise StartupError(
            f"the store of the ranks at MASTER_ADDR {place.address}, MASTER_PORT {place.port}, cannot {done}",
            flag="MASTER_ADDR",
        ) from error


def _told(store: Any) -> str:
    try:
        return str(store.get(_KEY).decode())
    except RuntimeError as error:
        raise StartupError(f"rank 0 told no place within {PATIENCE.total_seconds():g} s", flag="WORLD_SIZE") from error


def _process_behind(connection: Connection) -> int:
    """Number of the process at the other end. Raises StartupError for another user's."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        pid, user, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.getuid():
        raise StartupError("a rank of this model is another user's process", flag="MASTER_ADDR")
    return int(pid)
