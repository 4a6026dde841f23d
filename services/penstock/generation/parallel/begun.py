"""Processes of the other ranks, begun before rank 0 imports torch: all import it at the same time.

They wait for rank 0's order, which names the model and their part of it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection

from penstock.common.environment import current_environment
from penstock.common.errors import StartupError
from penstock.generation.parallel.launch import Rendezvous


@dataclass(frozen=True, slots=True)
class BegunRank:
    """Process of a rank, and this end of its socket."""

    process: subprocess.Popen[bytes]
    connection: Connection

    @classmethod
    def begin(cls) -> BegunRank:
        """Start a process."""
        ours, theirs = socket.socketpair()
        # A window for messages of prompts, so that rank 0 computes while they are read.
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with theirs:
            # "-P": as `penstock` itself, without the folder that it was started in.
            command = [sys.executable, "-P", "-m", "penstock.generation.parallel.worker", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        return cls(process, Connection(ours.detach()))


class BegunRanks:
    """Ranks from 1 on that were begun, until they are taken. Used by one thread at a time."""

    def __init__(self) -> None:
        """Make it, with no rank yet."""
        self._ranks: list[BegunRank] = []

    def begin(self, count: int) -> None:
        """Begin the other ranks of a model in `count` processes, unless a launcher starts them. Never raises: the
        loader reports a wrong variable, or a process that the system refuses."""
        with contextlib.suppress(StartupError, OSError):
            is_launched = Rendezvous.of(current_environment(), count) is not None
            for _ in range(1, 1 if is_launched else count):
                self._ranks.append(BegunRank.begin())

    def take(self) -> BegunRank:
        """Return a rank, the caller's from now on; start one if none is left."""
        return self._ranks.pop() if self._ranks else BegunRank.begin()

    def close(self) -> None:
        """End the ranks that nobody has taken. Calling it again is harmless."""
        while self._ranks:
            rank = self._ranks.pop()
            rank.process.kill()
            rank.connection.close()
            rank.process.wait()
