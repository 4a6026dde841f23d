"""Blocks on their way between the host pool and a file: a thread that writes, and one that reads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from penstock.common.logging import get_logger
from penstock.generation.core.block_store import StoredBlock, StoreEvent, StoreFigures
from penstock.generation.host.block_file import Found

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.host.block_file import BlockFile

_log = get_logger(__name__)


class BlockFileStore:
    """BlockStore over a BlockFile. The engine's thread orders, two threads carry out; `figures` is for any thread.

    The file's faults end nothing: a block that cannot be written is not kept, and one that cannot be read is computed.
    """

    def __init__(self, file: BlockFile, fingerprint: bytes, buffers: Callable[[int], Seq[memoryview]]) -> None:
        """`buffers` are those of a block of the host pool, whole blocks of the file together."""
        self.file = file
        self.fingerprint = fingerprint
        self._buffers = buffers
        self._condition = threading.Condition()
        # Guarded by the condition.
        self._events: deque[StoreEvent] = deque()
        self._is_closing = False
        # Orders to forget that were given, by the engine's thread, and that were carried out, by the writer.
        self._changes = self._changed = 0
        # Each is written by one thread.
        self._queued = self._taken = 0
        self._written = self._evicted = self._read = self._refused = 0
        self._failed_writes = self._failed_reads = 0
        self._write_seconds = self._read_seconds = 0.0
        self._writer = _OrderThread("kv-disk-write")
        self._reader = _OrderThread("kv-disk-read")

    def has(self, key: bytes) -> bool:
        if self._changed != self._changes:
            return False
        try:
            return self.file.has(key)
        except OSError as error:
            _report("read", error)
            return False

    def save(self, number: int, blocks: Seq[StoredBlock]) -> None:
        self._queued += len(blocks)
        self._writer.put(lambda: self._save(number, blocks))

    def fetch(self, number: int, blocks: Seq[StoredBlock]) -> None:
        self._reader.put(lambda: self._fetch(number, blocks))

    def forget(self, keys: Iterable[bytes]) -> None:
        listed = tuple(keys)

        def forget_all() -> None:
            for key in listed:
                self.file.forget(key)

        self._changes += 1
        self._writer.put(lambda: self._change(forget_all))

    def clear(self) -> None:
        self._changes += 1
        self._writer.put(lambda: self._change(self.file.clear))

    def events(self) -> list[StoreEvent]:
        if not self._events:
            return []
        with self._condition:
            events = list(self._events)
            self._events.clear()
        return events

    def wait(self, seconds: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: bool(self._events), seconds)

    def figures(self) -> StoreFigures:
        """Return the totals. Thread-safe."""
        return StoreFigures(
            blocks=self.file.num_blocks,
            queued_blocks=max(self._queued - self._taken, 0),
            written_blocks=self._written,
            read_blocks=self._read,
            write_seconds=self._write_seconds,
            read_seconds=self._read_seconds,
            refused_blocks=self._refused,
            failed_blocks=self._failed_writes + self._failed_reads,
            evicted_blocks=self._evicted,
        )

    def close(self, wait_seconds: float | None = None) -> None:
        """End the threads after the block that each is at, and close the file. Orders that wait are dropped, but for
        those to forget: what cannot be trusted must not outlive this process.

        A thread that does not end within `wait_seconds` keeps the file open until the process ends.
        """
        self._is_closing = True
        have_ended = [thread.close(wait_seconds) for thread in (self._writer, self._reader)]
        if all(have_ended):
            self.file.close()

    def _save(self, number: int, blocks: Seq[StoredBlock]) -> None:
        done: list[bool] = []
        for key, block in blocks:
            if self._is_closing:
                return
            begun = time.perf_counter()
            try:
                written = self.file.write(key, self._buffers(block))
            except OSError as error:
                self._failed_writes += 1
                _report("write", error)
                done.append(False)
            else:
                self._written += written.is_new
                self._evicted += written.evicted
                done.append(True)
            self._write_seconds += time.perf_counter() - begun
            self._taken += 1
        self._add_event(StoreEvent(number, tuple(done)))

    def _fetch(self, number: int, blocks: Seq[StoredBlock]) -> None:
        done: list[bool] = []
        for key, block in blocks:
            if self._is_closing:
                return
            if False in done:
                # A prefix ends where a block is missing.
                done.append(False)
                continue
            begun = time.perf_counter()
            try:
                found = self.file.read(key, self._buffers(block))
            except OSError as error:
                self._failed_reads += 1
                _report("read", error)
                found = Found.ABSENT
            if found is Found.REFUSED:
                self._refused += 1
                _log.error("a block of the file is not what was written: its tokens are computed", flag="--kv-disk")
            self._read += found is Found.READ
            self._read_seconds += time.perf_counter() - begun
            done.append(found is Found.READ)
        self._add_event(StoreEvent(number, tuple(done)))

    def _change(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            _report("write", error)
        self._changed += 1

    def _add_event(self, event: StoreEvent) -> None:
        with self._condition:
            self._events.append(event)
            self._condition.notify()


class _OrderThread:
    """Thread that carries out orders one after the other; it starts with the first one."""

    def __init__(self, name: str) -> None:
        self._orders: deque[Callable[[], None] | None] = deque()
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, order: Callable[[], None]) -> None:
        """Append an order."""
        with self._condition:
            self._orders.append(order)
            self._condition.notify()
        if self._thread.ident is None:
            self._thread.start()

    def close(self, wait_seconds: float | None) -> bool:
        """End after the orders that were put, and wait for that. False: it has not ended within `wait_seconds`."""
        with self._condition:
            self._orders.append(None)
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._orders))
                order = self._orders.popleft()
            if order is None:
                return
            order()


def _report(doing: str, error: OSError) -> None:
    _log.warning(f"the file of blocks cannot be {'read' if doing == 'read' else 'written'}", cause=str(error))
