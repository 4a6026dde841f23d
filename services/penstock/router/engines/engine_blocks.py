"""Cached blocks that another engine tells by its own hashes, in the names that a router makes of prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.common.block_hashes import SCHEME, chain_hash, root_hash, short_name
from penstock.engines import smg_common_pb2
from penstock.v1 import admin_pb2

# Tokens of a block as a router names it where an engine serves: as many as our own backends' have, so that both kinds
# can be compared for one prompt.
NAMED_TOKENS = 16
# The engine's own memory; blocks of others are slower to use, and not counted.
_DEVICE = 0


@dataclass(slots=True)
class _Block:
    """Block of an engine: the hash up to the last end of a named block in it, the ids behind that, the names of those
    that end in it, its tokens, and the number of its copies."""

    chain: bytes
    rest: bytes
    names: tuple[int, ...] = ()
    num_tokens: int = 0
    copies: int = 1


class EngineBlocks:
    """Names of at most `capacity` blocks that an engine has told of, without a salt: it shares them among all callers.

    Later blocks than that are left out, until others are gone.
    """

    def __init__(self, named_tokens: int, capacity: int) -> None:
        """`named_tokens`: tokens of a block that is named; the engine's own blocks may have any size."""
        self._named_bytes = 4 * named_tokens
        self._most_tokens, self._num_tokens = capacity * named_tokens, 0
        # By the engine's own hash of the prefix up to the end of each.
        self._blocks: dict[int, _Block] = {}
        # Blocks of a name: engine processes behind one address may have other hashes for the same ids.
        self._holders: dict[int, int] = {}
        # What is not told on yet: names, True for those that it has.
        self._changes: dict[int, bool] = {}
        self._begins_anew = True
        # Number of the last batch of each data-parallel rank.
        self._numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def begin(self) -> None:
        """Forget everything: a stream begins, or batches were lost."""
        self._numbers.clear()
        self._clear()

    def take(self, batch: smg_common_pb2.KvEventBatch) -> None:
        """Take a batch of events. After a gap nothing from before it counts."""
        number, last = batch.sequence_number, self._numbers.get(batch.dp_rank)
        if not batch.events:
            # A report of load alone repeats the last number. One with the next number had events that tell nothing.
            if last is not None and number == last + 1:
                self._numbers[batch.dp_rank] = number
            return
        if last is not None and number != last + 1:
            self.begin()
        self._numbers[batch.dp_rank] = number
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "stored":
                self._store(event.stored)
            elif kind == "removed" and event.removed.cache_level == _DEVICE:
                for block_hash in event.removed.block_hashes:
                    self._remove(block_hash)
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
        self._blocks.clear()
        self._holders.clear()
        self._changes.clear()
        self._num_tokens, self._begins_anew = 0, True

    def _store(self, stored: smg_common_pb2.KvBlocksStored) -> None:
        if stored.lora_name or stored.cache_salt:
            return
        before = _Block(root_hash(""), b"")
        if stored.HasField("parent_block_hash"):
            parent = self._blocks.get(stored.parent_block_hash)
            if parent is None:
                # After a block that is not known no prompt can be recognised.
                return
            before = parent
        for block in stored.blocks:
            if block.HasField("lora_id") or block.extra_keys or block.cache_level != _DEVICE or not block.token_ids:
                return
            known = self._blocks.get(block.block_hash)
            if known is not None:
                known.copies += 1
            else:
                known = self._after(before, block.token_ids)
                if self._num_tokens + known.num_tokens > self._most_tokens:
                    return
                self._blocks[block.block_hash] = known
                self._num_tokens += known.num_tokens
                for name in known.names:
                    self._holders[name] = self._holders.get(name, 0) + 1
                    self._changes[name] = True
            before = known

    def _remove(self, block_hash: int) -> None:
        block = self._blocks.get(block_hash)
        if block is None:
            return
        block.copies -= 1
        if block.copies:
            return
        del self._blocks[block_hash]
        self._num_tokens -= block.num_tokens
        for name in block.names:
            left = self._holders.pop(name) - 1
            if left:
                self._holders[name] = left
            else:
                self._changes[name] = False

    def _after(self, before: _Block, token_ids: Sequence[int]) -> _Block:
        """Return the block with these ids after another one."""
        data, chain, names = before.rest + array("I", token_ids).tobytes(), before.chain, []
        width = self._named_bytes
        whole = len(data) - len(data) % width
        for end in range(width, whole + 1, width):
            chain = chain_hash(chain, data[end - width : end])
            names.append(short_name(chain))
        return _Block(chain, data[whole:], tuple(names), len(token_ids))
