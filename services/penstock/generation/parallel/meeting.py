"""Meeting of a launcher's ranks with rank 0, by the launcher's store; from then on they are rank 0's processes.

The store holds the path of a socket in a folder of rank 0's user. All messages go through that socket: a process
without access to the folder can neither take part nor give orders.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import shutil
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from penstock.common.errors import StartupError
from penstock.generation.parallel.launch import Rendezvous
from penstock.generation.parallel.rank_group import PATIENCE
from penstock.generation.parallel.rank_messages import REFUSED

_PREFIX = "penstock-meeting-"
_SOCKET = "ranks"
_RANK = struct.Struct("<I")
# Of SO_PEERCRED: process, user, group.
_PEER = struct.Struct("iII")
# A window for messages of prompts, so that rank 0 computes while they are read.
_WINDOW = 1 << 20
# Of one try to reach a store that another process opens, between two looks at whether it will.
_TRY = timedelta(seconds=2)
# For the port of a group that ends, or of a connection that does, and between two looks; in seconds.
_PORT_SECONDS, _PORT_LOOK = 10.0, 0.2


class LaunchedProcess:
    """Process of a rank that is not a child of this one: the part of Popen's interface that ranks need."""

    def __init__(self, pid: int) -> None:
        """Take it. Raises ProcessLookupError."""
        self.pid = pid
        self._end = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._end)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end; only the launcher gets its status. Raises subprocess.TimeoutExpired."""
        if not _readable([self._end], timeout):
            raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)

    def kill(self) -> None:
        """Kill it; harmless if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._end, signal.SIGKILL)


class Meeting:
    """Rank 0's side: a socket that each other rank connects to once.

    Threads: any may close it while one takes the ranks. After the last rank nothing is left in a folder. Only a name on
    this machine stays: by it, processes that come later know that they are no ranks.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        """Open it, and tell its path. Raises StartupError naming RANK, TMPDIR, MASTER_ADDR, MASTER_PORT."""
        rendezvous.use()
        self._rendezvous = rendezvous
        # Held while a rank is taken.
        self._lock = threading.Lock()
        self._wake, self._woken = os.pipe()
        # Connections without a number so far, by descriptor; numbers of the others; and those not taken yet.
        self._unheard: dict[int, Connection] = {}
        self._numbers: set[int] = set()
        self._came: dict[int, tuple[LaunchedProcess, Connection]] = {}
        self._num_taken = 0
        self._folder, self._socket = _listen(rendezvous.count)
        self._is_closed = False
        # Where the launcher has no store, once all have come.
        self._name: socket.socket | None = None
        weakref.finalize(self, _release, self._folder, self._socket, self._wake)
        # Where the launcher has no store, it ends with this object.
        self._store: Any = None
        try:
            self._store = _store(rendezvous)
            _publish(self._store, rendezvous, f"{self._folder}/{_SOCKET}")
        except BaseException:
            self.close()
            raise

    def take(self, number: int, order: dict[str, Any]) -> tuple[LaunchedProcess, Connection]:
        """Wait for a rank, and send it its order. Raises StartupError."""
        deadline = time.monotonic() + PATIENCE.total_seconds()
        with self._lock:
            while number not in self._came:
                self._wait(number, deadline)
            process, connection = self._came.pop(number)
            try:
                connection.send_bytes(json.dumps(order).encode())
            except OSError as error:
                connection.close()
                raise StartupError(
                    f"rank {number} of {self._rendezvous.count} has ended before it got its part: its own lines say "
                    "why",
                    flag="RANK",
                ) from error
            self._num_taken += 1
            if self._num_taken == self._rendezvous.count - 1:
                self._refuse_others()
                if not self._rendezvous.is_store_there:
                    self._name = _named(self._rendezvous)
                self._end()
        return process, connection

    def _wait(self, number: int, deadline: float) -> None:
        """Wait for the next event. Raises StartupError when it is closed, and at the deadline."""
        waited = [self._wake] if self._is_closed else [self._wake, self._socket.fileno(), *self._unheard]
        ready = _readable(waited, max(0.0, deadline - time.monotonic()))
        if self._wake in ready:
            raise StartupError("the start was given up", flag="RANK")
        if not ready:
            raise StartupError(
                f"rank {number} of {self._rendezvous.count} did not come within {PATIENCE.total_seconds():g} s: is it "
                "started, with the same MASTER_ADDR and MASTER_PORT?",
                flag="WORLD_SIZE",
            )
        for descriptor in ready:
            if descriptor in self._unheard:
                self._hear(self._unheard.pop(descriptor))
            else:
                self._let_in()

    def _let_in(self) -> None:
        came, _ = self._socket.accept()
        came.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WINDOW)
        connection = Connection(came.detach())
        self._unheard[connection.fileno()] = connection

    def _hear(self, connection: Connection) -> None:
        """Read the number of a connection. Raises StartupError for a rank that came already."""
        pid = _process_behind(connection)
        try:
            # It comes in one piece: a connection that sends less is dropped.
            os.set_blocking(connection.fileno(), False)
            (number,) = _RANK.unpack(connection.recv_bytes(_RANK.size))
            os.set_blocking(connection.fileno(), True)
            process = LaunchedProcess(pid)
        except (OSError, EOFError, struct.error):
            # It has ended already; if it was a rank, the launcher ends this process as well.
            connection.close()
            return
        if number in self._numbers or not 0 < number < self._rendezvous.count:
            _refuse(connection)
            raise StartupError(f"two processes of the launcher have RANK {number}", flag="RANK")
        self._numbers.add(number)
        self._came[number] = process, connection

    def _refuse_others(self) -> None:
        """Tell the processes that came in addition to the ranks."""
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._let_in()
        for connection in self._unheard.values():
            _refuse(connection)
        self._unheard.clear()

    def _end(self) -> None:
        """Accept no more connections, and remove the socket."""
        for connection in self._unheard.values():
            connection.close()
        self._unheard.clear()
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._store = None

    def close(self) -> None:
        """Accept no more connections; a wait for a rank ends. Ranks that were not taken end. Calling it again is
        harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._woken)
        with self._lock:
            for _, connection in self._came.values():
                connection.close()
            self._came.clear()
            self._end()
            if self._name is not None:
                self._name.close()


def _readable(descriptors: list[int], timeout: float | None) -> list[int]:
    """Wait for one of them, whatever its number: select() takes none above 1,023."""
    with selectors.PollSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        return [key.fd for key, _ in selector.select(timeout)]


def _listen(count: int) -> tuple[str, socket.socket]:
    """Make a private folder of this user with a socket in it. Raises StartupError naming TMPDIR."""
    with contextlib.ExitStack() as undo:
        listening = undo.enter_context(socket.socket(socket.AF_UNIX))
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX)
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            with _short(folder) as path:
                listening.bind(path)
            listening.listen(count)
        except OSError as error:
            raise StartupError(f"TMPDIR cannot have the socket where the ranks meet: {error}", flag="TMPDIR") from error
        undo.pop_all()
    return folder, listening


@contextlib.contextmanager
def _short(folder: str) -> Iterator[str]:
    """Yield the path of the socket in a folder, short enough for an address with a TMPDIR of any length.

    Raises OSError, also for a folder that others may write to.
    """
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(errno.EPERM, "it is not this user's alone", folder)
        yield f"/proc/self/fd/{descriptor}/{_SOCKET}"
    finally:
        os.close(descriptor)


def _release(folder: str, listening: socket.socket, wake: int) -> None:
    listening.close()
    os.close(wake)
    shutil.rmtree(folder, ignore_errors=True)


def _refuse(connection: Connection) -> None:
    """Tell a process that it is not a rank: see `serve`."""
    with contextlib.suppress(OSError):
        connection.send_bytes(
            json.dumps({REFUSED: "rank 0 has all of its ranks: two processes have one RANK"}).encode()
        )
    connection.close()


def meet_rank_0(rendezvous: Rendezvous) -> tuple[Connection, int]:
    """Wait for rank 0; return the connection to it and the number of its process. Raises StartupError."""
    rendezvous.use()
    path = _told(_store(rendezvous), rendezvous)
    folder, name = os.path.split(path)
    if name != _SOCKET or not os.path.basename(folder).startswith(_PREFIX) or not os.path.isabs(folder):
        raise StartupError(f"the store at MASTER_ADDR tells no place of rank 0: {path[:200]!r}", flag="MASTER_ADDR")
    link = socket.socket(socket.AF_UNIX)
    try:
        with _short(folder) as short:
            link.connect(short)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WINDOW)
        connection = Connection(link.detach())
        # Orders name files to read: only orders of this user are accepted.
        pid = _process_behind(connection)
        connection.send_bytes(_RANK.pack(rendezvous.rank))
    except OSError as error:
        link.close()
        raise StartupError(
            f"rank 0 cannot be reached at {path} ({error.strerror or error}): it has ended, or has another process as "
            f"rank {rendezvous.rank}",
            flag="MASTER_ADDR",
        ) from error
    return connection, pid


def _store(rendezvous: Rendezvous) -> Any:
    """Return torch's store of the launcher, or this group's own.

    Raises StartupError naming RANK, MASTER_ADDR, MASTER_PORT.
    """
    is_ours = rendezvous.rank == 0 and not rendezvous.is_store_there
    deadline = time.monotonic() + (_PORT_SECONDS if is_ours else PATIENCE.total_seconds())
    distributed: Any = dist
    while True:
        if not rendezvous.is_store_there and _has_all(rendezvous):
            raise StartupError(
                f"a model has all of its ranks by MASTER_PORT {rendezvous.port} already: two processes have RANK "
                f"{rendezvous.rank}, or two programs this MASTER_PORT",
                flag="RANK",
            )
        try:
            store = distributed.TCPStore(
                rendezvous.address,
                rendezvous.port,
                rendezvous.count,
                is_ours,
                PATIENCE if is_ours or rendezvous.is_store_there else _TRY,
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            is_taken = is_ours and "EADDRINUSE" in str(error)
            if (is_taken or not (is_ours or rendezvous.is_store_there)) and time.monotonic() < deadline:
                if is_taken:
                    time.sleep(_PORT_LOOK)
                continue
            where = f"the store of the ranks at MASTER_ADDR {rendezvous.address}, MASTER_PORT {rendezvous.port}, cannot"
            if not is_ours:
                raise StartupError(f"{where} be reached", flag="MASTER_ADDR") from error
            cause = "another program has the port" if is_taken else (str(error).splitlines() or [repr(error)])[0]
            raise StartupError(f"{where} be opened: {cause}", flag="MASTER_PORT") from error
        store.set_timeout(PATIENCE)
        return store


def _name(rendezvous: Rendezvous) -> str:
    """Return the name, in Linux's abstract namespace, of a group that has all of its ranks."""
    return f"\0penstock-ranks-{os.getuid()}-{rendezvous.port}"


def _named(rendezvous: Rendezvous) -> socket.socket | None:
    """Take the name of a group; None where something else has it. It goes with this process."""
    named = socket.socket(socket.AF_UNIX)
    try:
        named.bind(_name(rendezvous))
        named.listen()
    except OSError:
        named.close()
        return None
    return named


def _has_all(rendezvous: Rendezvous) -> bool:
    """True where a process of this user has the name of this group."""
    with socket.socket(socket.AF_UNIX) as link:
        link.setblocking(False)
        try:
            link.connect(_name(rendezvous))
        except BlockingIOError:
            # Many have come.
            return True
        except OSError:
            return False
        _, user, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.getuid())


def _key(rendezvous: Rendezvous) -> str:
    """Return the key of the path in the store; the store has those of earlier attempts as well."""
    return f"penstock/ranks/{rendezvous.attempt}"


def _publish(store: Any, rendezvous: Rendezvous, path: str) -> None:
    try:
        store.set(_key(rendezvous), path)
    except RuntimeError as error:
        raise StartupError("the store of the ranks at MASTER_ADDR takes nothing", flag="MASTER_ADDR") from error


def _told(store: Any, rendezvous: Rendezvous) -> str:
    try:
        return str(store.get(_key(rendezvous)).decode(errors="replace"))
    except RuntimeError as error:
        raise StartupError(f"rank 0 told no place within {PATIENCE.total_seconds():g} s", flag="WORLD_SIZE") from error


def _process_behind(connection: Connection) -> int:
    """Number of the process at the other end. Raises StartupError for a process of another user."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        pid, user, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.getuid():
        raise StartupError("a rank of this model is another user's process", flag="MASTER_ADDR")
    return int(pid)
