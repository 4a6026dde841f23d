"""Events of an engine's prefix cache in vLLM's protocol: a gateway learns from them which worker has a prompt."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.common.block_hashes import short_name
from penstock.engines import smg_common_pb2
from penstock.generation.delivery.hub import OutputHub

if TYPE_CHECKING:
    from penstock.generation.core import sequence as sequences
    from penstock.generation.engine.engine import Engine

# Seconds between two batches; most events of one, and batches that are kept for those who come back.
_INTERVAL_SECONDS, _MOST_EVENTS, _MOST_BATCHES = 0.05, 1024, 1024
# Events that wait while nobody reads; then the cache is told anew as if it were empty.
_MOST_PENDING = 1 << 16


class _Stored(NamedTuple):
    """A block that can be found from now on. `parent`: name of the block before it; None: it begins a prompt."""

    name: int
    parent: int | None
    token_ids: tuple[int, ...]


# A name: a block that cannot be found any more. None: nothing that was told before counts.
_Event = _Stored | int | None


class KvEventLog:
    """Blocks of prompts without a salt, as they come and go: others are out of reach of this protocol's callers.

    The engine's thread adds them, the event loop takes them.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._lock = threading.Lock()
        self._told: set[int] = set()
        self._pending: deque[_Event] = deque()

    def follow(self, engine: Engine) -> None:
        """Hear of blocks from now on. Engine thread only."""
        engine.hear_blocks(self._cached, self._gone)

    def take(self, most: int) -> list[_Event]:
        """Return the oldest events that were not taken, at most `most`. Thread-safe."""
        with self._lock:
            return [self._pending.popleft() for _ in range(min(most, len(self._pending)))]

    def _cached(self, sequence: sequences.Sequence, salt: str, first: int, last: int) -> None:
        if salt.partition("\0")[0]:
            return
        size, hashes, embeds = self._block_size, sequence.block_hashes, sequence.embeds
        with self._lock:
            for index in range(first, last):
                if embeds is not None and index * size < embeds.num_tokens:
                    # Nor can those after it be known by their ids.
                    return
                name = short_name(hashes[index])
                if name in self._told:
                    continue
                parent = short_name(hashes[index - 1]) if index else None
                ids = tuple(sequence.token_ids[index * size : (index + 1) * size])
                self._told.add(name)
                self._pending.append(_Stored(name, parent, ids))
            self._bound()

    def _gone(self, block_hash: bytes) -> None:
        name = short_name(block_hash)
        with self._lock:
            if name in self._told:
                self._told.remove(name)
                self._pending.append(name)
                self._bound()

    def _bound(self) -> None:
        """Begin anew when too much waits. The lock is held."""
        if len(self._pending) > _MOST_PENDING:
            self._pending.clear()
            self._told.clear()
            self._pending.append(None)


class KvEventStream:
    """Batches of one log, numbered from 1, for any number of readers. Belongs to one event loop."""

    def __init__(self, log: KvEventLog, hub: OutputHub) -> None:
        self._log, self._hub = log, hub
        self._batches: deque[smg_common_pb2.KvEventBatch] = deque(maxlen=_MOST_BATCHES)
        self._next = 1

    async def read(self, start: int) -> AsyncGenerator[smg_common_pb2.KvEventBatch]:
        """Yield batches from number `start` on, as far as they are kept; 0, or a number of another process: from now
        on."""
        changed = self._hub.watch()
        try:
            self._collect()
            number = start if 0 < start <= self._next else self._next
            while not self._hub.closing:
                changed.clear()
                self._collect()
                for batch in [one for one in self._batches if one.sequence_number >= number]:
                    number = batch.sequence_number + 1
                    yield batch
                await self._hub.pause(_INTERVAL_SECONDS)
                await changed.wait()
        finally:
            self._hub.unwatch(changed)

    def _collect(self) -> None:
        """Make batches of all that waits."""
        while events := self._log.take(_MOST_EVENTS):
            batch = smg_common_pb2.KvEventBatch(sequence_number=self._next, timestamp=time.time())
            batch.events.extend(_messages(events, self._next))
            self._batches.append(batch)
            self._next += 1


def _messages(events: Sequence[_Event], number: int) -> list[smg_common_pb2.KvCacheEvent]:
    """Return events as messages: blocks that follow each other in one, and so those that are gone."""
    made: list[smg_common_pb2.KvCacheEvent] = []
    last: int | None = None
    for event in events:
        kind = made[-1].WhichOneof("data") if made else ""
        if isinstance(event, _Stored):
            if kind != "stored" or event.parent is None or event.parent != last:
                made.append(smg_common_pb2.KvCacheEvent(stored=smg_common_pb2.KvBlocksStored()))
                if event.parent is not None:
                    made[-1].stored.parent_block_hash = _signed(event.parent)
            ids = event.token_ids
            made[-1].stored.blocks.add(block_hash=_signed(event.name), token_ids=ids, block_size=len(ids))
            last = event.name
        elif event is None:
            made.append(smg_common_pb2.KvCacheEvent(cleared=smg_common_pb2.KvCacheCleared()))
        else:
            if kind != "removed":
                made.append(smg_common_pb2.KvCacheEvent(removed=smg_common_pb2.KvBlocksRemoved()))
            made[-1].removed.block_hashes.append(_signed(event))
    for place, message in enumerate(made):
        # As vLLM's own: the batch's number, and the place in it.
        message.event_id = (number & 0xFFFFFFFF) << 32 | place
    return made


def _signed(name: int) -> int:
    """Return a name as the protocol's signed number of 64 bits."""
    return name - (1 << 64) if name >> 63 else name
