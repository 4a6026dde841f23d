"""A store of blocks behind the host pool, as the engine sees it: keys, orders, and what came of them. Plain data."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq


class StoredBlock(NamedTuple):
    """Block of the host pool, and the key of its content in the store."""

    key: bytes
    block: int


class StoreEvent(NamedTuple):
    """End of an order: its number, and what came of each of its blocks: written or kept already, or read."""

    number: int
    done: tuple[bool, ...]


class StoreFigures(NamedTuple):
    """Totals of a store since its start, and its room; all 0: there is none."""

    blocks: int = 0
    # Orders' blocks that wait to be written.
    queued_blocks: int = 0
    written_blocks: int = 0
    read_blocks: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0
    # Blocks that were there and are not what was written.
    refused_blocks: int = 0
    # Blocks that could not be written or read.
    failed_blocks: int = 0
    # Blocks that others took the place of.
    evicted_blocks: int = 0


class BlockStore(Protocol):
    """Interface of a store to the engine. `save` and `fetch` return at once; their ends are events.

    An order owns its blocks of the host pool until its event: nobody else writes the ones to save, or reads the ones to
    fetch.
    """

    # Tells models, number formats and layouts apart: part of every key.
    fingerprint: bytes

    def has(self, key: bytes) -> bool:
        """Return True when the store seems to have the content: it is checked when it is read. False while anything
        that was ordered to be forgotten may still be there."""
        ...

    def save(self, number: int, blocks: Seq[StoredBlock]) -> None:
        """Write blocks of the host pool, each unless it is there."""
        ...

    def fetch(self, number: int, blocks: Seq[StoredBlock]) -> None:
        """Read into blocks of the host pool, up to the first that is missing."""
        ...

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget contents, after all that was ordered before."""
        ...

    def clear(self) -> None:
        """Forget every content, also those of other processes, after all that was ordered before."""
        ...

    def events(self) -> list[StoreEvent]:
        """Return the ends of orders since the last call."""
        ...

    def wait(self, seconds: float) -> None:
        """Return once there is an event, or after `seconds`."""
        ...


def key_of(fingerprint: bytes, block_hash: bytes, group: int, place: int) -> bytes:
    """Return the key of the `place`-th block of a group of layers that holds the prefix of `block_hash`."""
    return hashlib.sha256(b"%b%b%d.%d" % (fingerprint, block_hash, group, place)).digest()
