"""The other ranks' processes, as rank 0 has them: started, told, watched, ended."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.generation.parallel.group import RankGroup
from penstock.generation.parallel.messages import PoolOrder, encode_answer, encode_forget, encode_fragments
from penstock.generation.weights.sharding import FLAG, Shard

if TYPE_CHECKING:
    from penstock.generation.devices.base import Device

_log = get_logger("penstock.generation")
# Answers of a rank to its orders; any other text is its error.
READY = b"ready"
_YIELD_SECONDS = 1e-4


@dataclass(frozen=True, slots=True)
class _Rank:
    """Process of one further rank."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection


class RankLost(RuntimeError):
    """A rank's process has ended while it was needed."""


class Ranks:
    """Ranks 1 to `count` - 1 of a group of which this process is rank 0.

    Threads: any may send messages and close; all ranks get the messages in one order. `group`, whose calls answer
    messages of theirs, is used by one thread at a time, the engine's once it runs.
    """

    def __init__(self, count: int, device: Device, order: dict[str, Any]) -> None:
        """Start them. `device` is rank 0's; `order` is what each needs to load its part, as JSON: see worker.py.

        Raises StartupError naming --tensor-parallel where the device has none.
        """
        devices = [device.of_rank(number) for number in range(1, count)]
        self.group = RankGroup(Shard(0, count))
        self._device = device
        # Called once, on a thread of its own, when a rank is lost.
        self.on_loss: Callable[[RankLost], None] | None = None
        self._folder = tempfile.mkdtemp(prefix="penstock-ranks-")
        self._is_closed = False
        self._lock = threading.Lock()
        # Held while a message is sent, and while one is sent in fragments.
        self._sending, self._fragmenting = threading.Lock(), threading.Lock()
        self._adapter_numbers = itertools.count()
        # Adapters that nothing here uses any more, which the ranks still have.
        self._forgotten: deque[int] = deque()
        self._ranks: list[_Rank] = []
        self._wake, self._woken = os.pipe()
        try:
            for number, name in enumerate(devices, 1):
                self._ranks.append(_start(number, {**order, "device": name, "rank": number, "count": count}))
        except BaseException:
            self.close()
            os.close(self._wake)
            raise
        # Opened here: the thread may begin after `close` has ended them, and their numbers be other processes' by then.
        ends = [(os.pidfd_open(rank.process.pid), rank) for rank in self._ranks]
        threading.Thread(target=self._watch, args=(ends,), name="ranks", daemon=True).start()

    def wait_loaded(self) -> None:
        """Return once each has loaded its part. Raises StartupError with a rank's own words."""
        for rank in self._ranks:
            self._answer_of(rank)

    def wait_done(self) -> None:
        """Return once each has done all that it was told. Before `make_pools` only. Raises StartupError."""
        self._ask(encode_answer())

    def make_pools(self, num_blocks: int, block_size: int, dtype: str, num_host_blocks: int) -> None:
        """Let each have a pool like this process's, and join. Raises StartupError."""
        meeting = str(Path(self._folder) / "meeting")
        self._ask(PoolOrder(num_blocks, block_size, dtype, num_host_blocks, meeting).encoded())
        try:
            self.group.join(Path(meeting), self._device)
        except RuntimeError as error:
            raise StartupError(f"the ranks of {FLAG} did not meet: {error}", flag=FLAG) from error

    def send(self, message: bytes) -> None:
        """Send a message to each. Raises RankLost."""
        with self._sending:
            if self._forgotten:
                self._send(encode_forget([self._forgotten.popleft() for _ in range(len(self._forgotten))]))
            self._send(message)

    def send_in_fragments(self, message: bytes) -> None:
        """Send a long message to each; messages of `send` on other threads come in between. Raises RankLost."""
        with self._fragmenting:
            for fragment in encode_fragments(message):
                self.send(fragment)
                # A lock goes to whoever asks first, and the engine's thread, which may wait for it, has to wake up.
                time.sleep(_YIELD_SECONDS)

    def new_adapter(self) -> int:
        """Return a number that no adapter has had."""
        return next(self._adapter_numbers)

    def forget_adapter(self, number: int) -> None:
        """Let the next message tell the ranks to drop an adapter. On any thread, in the middle of `send` too."""
        self._forgotten.append(number)

    def _send(self, message: bytes) -> None:
        try:
            for rank in self._ranks:
                rank.connection.send_bytes(message)
        except OSError as error:
            raise RankLost("a rank of this model has ended") from error

    def close(self) -> None:
        """End them. Again is no harm; a call that waits for one of them fails."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.close(self._woken)
        for rank in self._ranks:
            # They end at the end of their connections, too; one that is in a collective by the signal alone.
            rank.process.kill()
        # A message that is being sent fails now: a connection that it waits for must not be closed under it.
        with self._sending:
            for rank in self._ranks:
                rank.connection.close()
        for rank in self._ranks:
            rank.process.wait()
        self.group.leave()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, message: bytes) -> None:
        """Send a message that is answered, and wait for the answers. Raises StartupError."""
        try:
            self.send(message)
        except RankLost as error:
            raise StartupError(f"a rank of {FLAG} ended after it had loaded", flag=FLAG) from error
        for rank in self._ranks:
            self._answer_of(rank)

    def _answer_of(self, rank: _Rank) -> None:
        try:
            answer = rank.connection.recv_bytes()
        except (EOFError, OSError) as error:
            code = rank.process.wait()
            raise StartupError(
                f"rank {rank.number} of {FLAG} ended with code {code} while it loaded: its own lines say why",
                flag=FLAG,
            ) from error
        if answer != READY:
            said = json.loads(answer)
            raise StartupError(f"rank {rank.number}: {said['message']}", flag=said["flag"])

    def _watch(self, ends: list[tuple[int, _Rank]]) -> None:
        """Wait for the end of any that nobody asked for. `ends` has a descriptor of each process, closed here."""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
            opened.callback(os.close, self._wake)
            selector.register(self._wake, selectors.EVENT_READ)
            for descriptor, rank in ends:
                opened.callback(os.close, descriptor)
                selector.register(descriptor, selectors.EVENT_READ, rank)
            gone = [key.data for key, _ in selector.select() if key.data is not None]
        if not gone or self._is_closed:
            return
        (rank, *_) = gone
        error = RankLost(f"rank {rank.number} of {len(self._ranks) + 1} has ended: this process ends")
        if self.on_loss is None:
            # It was lost while the model loads: that has no answer of it, and tells.
            return
        _log.error(str(error), code=rank.process.wait())
        for one in self._ranks:
            # Collectives that wait for it fail by themselves; those that wait for another must not wait either.
            one.process.kill()
        self.on_loss(error)


def _start(number: int, order: dict[str, Any]) -> _Rank:
    ours, theirs = socket.socketpair()
    # A window for messages of prompts, so that rank 0 computes while they are read.
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with theirs:
        # "-P": as `penstock` itself, without the folder that it was started in.
        command = [sys.executable, "-P", "-m", "penstock.generation.parallel.worker", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
    connection = Connection(ours.detach())
    connection.send_bytes(json.dumps(order).encode())
    return _Rank(number, process, connection)
