"""Cached blocks that another engine tells by its own hashes, in the names that a router makes of prompts."""

from __future__ import annotations

from array import array

from penstock.common.block_hashes import SCHEME, chain_hash, root_hash, short_name
from penstock.engines import smg_common_pb2
from penstock.v1 import admin_pb2

# The engine's own memory; blocks of others are slower to use, and not counted.
_DEVICE = 0


class EngineBlocks:
    """Names of at most `capacity` blocks that an engine has told of, without a salt: it shares them among all callers.

    Later blocks than that are left out, until others are gone.
    """

    def __init__(self, block_size: int, capacity: int) -> None:
        """`block_size`: tokens of a block; blocks of another size are left out."""
        self._block_size, self._capacity = block_size, capacity
        # Hash of the prefix up to the end of each block, by the engine's own.
        self._chains: dict[int, bytes] = {}
        # What is not told on yet: names, True for those that it has.
        self._changes: dict[int, bool] = {}
        self._begins_anew = True
        # Number of the last batch of each data-parallel rank.
        self._numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._chains)

    def begin(self) -> None:
        """Forget everything: a stream begins, or batches were lost."""
        self._numbers.clear()
        self._clear()

    def take(self, batch: smg_common_pb2.KvEventBatch) -> None:
        """Take a batch of events. After a gap nothing from before it counts."""
        if not batch.events:
            # A report of load alone: it repeats the last number.
            return
        if batch.sequence_number != self._numbers.get(batch.dp_rank, batch.sequence_number - 1) + 1:
            self.begin()
        self._numbers[batch.dp_rank] = batch.sequence_number
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "stored":
                self._store(event.stored)
            elif kind == "removed" and event.removed.cache_level == _DEVICE:
                for block_hash in event.removed.block_hashes:
                    chain = self._chains.pop(block_hash, None)
                    if chain is not None:
                        self._changes[short_name(chain)] = False
            elif kind == "cleared":
                self._clear()

    def changes(self) -> admin_pb2.PrefixChanges | None:
        """Return what has changed since the last call; None: nothing."""
        if not self._changes and not self._begins_anew:
            return None
        told = admin_pb2.PrefixChanges(scheme=SCHEME, begins_anew=self._begins_anew)
        told.kept.extend(name for name, is_kept in self._changes.items() if is_kept)
        told.gone.extend(name for name, is_kept in self._changes.items() if not is_kept)
        self._changes, self._begins_anew = {}, False
        return told

    def _clear(self) -> None:
        self._chains.clear()
        self._changes.clear()
        self._begins_anew = True

    def _store(self, stored: smg_common_pb2.KvBlocksStored) -> None:
        chain = self._chains.get(stored.parent_block_hash) if stored.HasField("parent_block_hash") else root_hash("")
        for block in stored.blocks:
            is_usable = len(block.token_ids) == self._block_size and not block.HasField("lora_id")
            # After a block that is not known no prompt can be recognised.
            if chain is None or not is_usable or block.cache_level != _DEVICE:
                return
            chain = chain_hash(chain, array("I", block.token_ids).tobytes())
            if block.block_hash not in self._chains:
                if len(self._chains) >= self._capacity:
                    return
                self._chains[block.block_hash] = chain
                self._changes[short_name(chain)] = True
