"""The other ranks' processes at rank 0: started, commanded, watched, ended."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.common.errors import StartupError, Unavailable
from penstock.common.logging import get_logger
from penstock.generation.parallel.adapter_loads import AdapterLoads
from penstock.generation.parallel.begun import BegunRanks
from penstock.generation.parallel.rank_group import RankGroup
from penstock.generation.parallel.rank_messages import READY, PoolOrder
from penstock.generation.weights.sharding import FLAG, Shard

if TYPE_CHECKING:
    from penstock.generation.devices.base import Device
    from penstock.generation.layers.lora import EmbeddingPart, LoraPart
    from penstock.generation.parallel.leader_adapters import HeldAdapter
    from penstock.generation.parallel.meeting import LaunchedProcess, Meeting

_log = get_logger("penstock.generation")
# Seconds between the end of a rank's connections, which a collective notices, and the end of its process.
_END_SECONDS = 0.5
# Seconds for a launcher's processes to end by themselves: they may be loading, and end with this process at the latest.
# A rank that has closed its connection may be a program that goes on; it is then killed.
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Rank:
    """Process of one further rank."""

    number: int
    process: subprocess.Popen[bytes] | LaunchedProcess
    connection: Connection

    def end(self, deadline: float) -> None:
        """Wait for its end, after its connection's, until `deadline` at most. A process of a launcher notices the end
        and exits by itself, with status 0; to the launcher a killed process would be a failure."""
        if isinstance(self.process, subprocess.Popen):
            self.process.wait()
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))

    def status(self) -> int | None:
        """End a rank that has closed its connection; return its exit code, which only the launcher gets for its own."""
        try:
            return self.process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class RankLost(RuntimeError):
    """Error for a needed rank with a process that has ended, or does not answer any more."""

    def __init__(self, message: str, rank: _Rank | None = None) -> None:
        """`rank`: the first missing one; None: all of them are gone."""
        super().__init__(message)
        self.rank = rank


class Ranks:
    """Ranks 1 to `count` - 1 of a group; this process is rank 0.

    Threads: any may send messages, load adapters and close; all ranks get the messages in one order. One thread at a
    time uses `group`, since its calls answer messages of its own: the engine's thread once it runs. Answers are read
    first by the thread that starts the ranks, then by that of the adapters.
    """

    def __init__(self, count: int, device: Device, meeting: Meeting | None = None) -> None:
        """Make them; `start` starts them. `device` is rank 0's; `meeting`: where a launcher's processes come, which are
        the ranks then; it is closed with them. Raises StartupError naming --tensor-parallel where the device has none.
        """
        self._devices = [device.of_rank(number) for number in range(1, count)]
        self.group = RankGroup(Shard(0, count))
        self._device = device
        # Called once, on a thread of its own, when a rank is lost.
        self.on_loss: Callable[[RankLost], None] | None = None
        self._folder = ""
        self._is_closed = self._is_broken = self._has_pools = False
        self._meeting = meeting
        self._lock = threading.Lock()
        # Held while a message is sent.
        self._sending = threading.Lock()
        self._ranks: list[_Rank] = []
        self._adapters = AdapterLoads(self.send, self._answers)
        # Ends of a pipe, which wakes the thread that watches.
        self._wake = self._woken = -1

    def start(self, order: dict[str, Any], begun: BegunRanks) -> None:
        """Take the processes that were begun, or the launcher's, and let them load. `order` is what each needs to load
        its part, as JSON: see worker.py.

        None of them is left where it fails; else `close` ends them. Raises StartupError for one that has ended.
        """
        self._folder = tempfile.mkdtemp(prefix="penstock-ranks-")
        self._adapters.start()
        self._wake, self._woken = os.pipe()
        try:
            for number, name in enumerate(self._devices, 1):
                own = {**order, "device": name, "rank": number, "count": len(self._devices) + 1}
                if self._meeting is not None:
                    self._ranks.append(_Rank(number, *self._meeting.take(number, own)))
                    continue
                taken = begun.take()
                self._ranks.append(_Rank(number, taken.process, taken.connection))
                try:
                    taken.connection.send_bytes(json.dumps(own).encode())
                except OSError as error:
                    raise _ended(self._ranks[-1]) from error
            # Here: the thread may begin after `close` has ended them, and their numbers may be reused by then.
            ends = [(os.pidfd_open(rank.process.pid), rank) for rank in self._ranks]
        except BaseException:
            self.close()
            os.close(self._wake)
            raise
        threading.Thread(target=self._watch, args=(ends,), name="ranks", daemon=True).start()

    def wait_loaded(self) -> None:
        """Return when each has loaded its part. Raises StartupError with a rank's own message."""
        for rank in self._ranks:
            self._answer_of(rank)

    def make_pools(self, num_blocks: int, block_size: int, dtype: str, num_host_blocks: int) -> None:
        """Let each make a pool like this process's, and join. Raises StartupError."""
        meeting = str(Path(self._folder) / "meeting")
        self._ask(PoolOrder(num_blocks, block_size, dtype, num_host_blocks, meeting).encoded())
        try:
            self.group.join(Path(meeting), self._device)
        except RuntimeError as error:
            raise StartupError(f"the ranks of {FLAG} did not meet: {error}", flag=FLAG) from error
        self._has_pools = True

    def send(self, message: bytes) -> None:
        """Send a message to each. Raises RankLost."""
        with self._sending:
            self._send(message)

    def load_adapter(
        self, sites: Mapping[int, Sequence[LoraPart]], embedding: EmbeddingPart | None
    ) -> Future[HeldAdapter]:
        """Let each take its part of an adapter, between the steps; the future has it when all have it.

        The future raises ResourceExhausted and InvalidArgument (a rank could not take it), and RankLost, as this does
        after they are closed; `as_seen` turns that into the error to raise.
        """
        # `close` must find every load: one that came after it would never end.
        with self._lock:
            if self._is_closed:
                raise RankLost("the ranks of this model were ended")
            return self._adapters.load(sites, embedding)

    def as_seen(self, lost: RankLost) -> StartupError | Unavailable:
        """Return the error for a load of an adapter that lost a rank."""
        if self._is_closed:
            return Unavailable("the adapter was not loaded: the server is stopping", reason="ENGINE_STOPPED")
        if not self._has_pools and lost.rank is not None:
            return _ended(lost.rank)
        return Unavailable(f"the adapter was not loaded: {lost}", reason="ENGINE_FAILED")

    def loss(self) -> RankLost | None:
        """Return the error of a rank that has ended, for a failed collective; None: no rank ends within a moment."""
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(_END_SECONDS)
                return self._lost(rank)
        return None

    def _lost(self, rank: _Rank) -> RankLost:
        return RankLost(f"rank {rank.number} of {len(self._ranks) + 1} has ended: this process ends", rank)

    def _send(self, message: bytes) -> None:
        for rank in self._ranks:
            if self._is_broken:
                raise RankLost("the ranks of this model have ended")
            try:
                rank.connection.send_bytes(message)
            except OSError as error:
                raise RankLost("a rank of this model has ended", rank) from error
            except BaseException:
                self._break()
                raise

    def _answers(self) -> list[bytes]:
        """Wait for the next answer of each. Raises RankLost."""
        return [self._receive(rank) for rank in self._ranks]

    def _receive(self, rank: _Rank) -> bytes:
        try:
            return rank.connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise RankLost("a rank of this model has ended", rank) from error
        except BaseException:
            self._break()
            raise

    def _break(self) -> None:
        """Kill all: after a truncated message nothing on a connection has a meaning.

        The loss is noticed like any other.
        """
        self._is_broken = True
        for rank in self._ranks:
            rank.process.kill()

    def close(self) -> None:
        """End them. Calling it again is harmless; a call that waits for one of them fails."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.close(self._woken)
        if self._meeting is not None:
            self._meeting.close()
        for rank in self._ranks:
            # They also end with their connections; a rank in a collective ends only by the signal.
            if isinstance(rank.process, subprocess.Popen):
                rank.process.kill()
        # Waits for messages and answers fail now: a connection must not be closed under them.
        self._adapters.stop()
        with self._sending:
            for rank in self._ranks:
                rank.connection.close()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for rank in self._ranks:
            rank.end(deadline)
        self.group.leave()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, message: bytes) -> None:
        """Send a message and wait for the answers. Raises StartupError."""
        try:
            self.send(message)
        except RankLost as error:
            raise StartupError(f"a rank of {FLAG} ended after it had loaded", flag=FLAG) from error
        for rank in self._ranks:
            self._answer_of(rank)

    def _answer_of(self, rank: _Rank) -> None:
        try:
            answer = self._receive(rank)
        except RankLost as error:
            raise _ended(rank) from error
        if answer != READY:
            said = json.loads(answer)
            raise StartupError(f"rank {rank.number}: {said['message']}", flag=said["flag"])

    def _watch(self, ends: list[tuple[int, _Rank]]) -> None:
        """Wait for the unexpected end of any of them. `ends` has a descriptor of each process, closed here."""
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
        error = self._lost(rank)
        if self.on_loss is None:
            # It was lost while the model loads: the load misses its answer and reports that.
            return
        code = rank.process.wait()
        _log.error(str(error), **({} if code is None else {"code": code}))
        for one in self._ranks:
            # Collectives that wait for it fail by themselves; those that wait for another rank must fail, too.
            one.process.kill()
        self.on_loss(error)


def _ended(rank: _Rank) -> StartupError:
    """Return the error of a start that lost a rank."""
    code = rank.status()
    status = "" if code is None else f" with code {code}"
    return StartupError(f"rank {rank.number} of {FLAG} ended{status} while it loaded: its own lines say why", flag=FLAG)
