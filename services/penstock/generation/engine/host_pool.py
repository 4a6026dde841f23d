"""Accounting of the host pool: blocks of swapped groups, and prefixes that the device's pool had no room for.

Another BlockPool counts its blocks, so they are shared, found by hash and evicted (least recently used first) like
those of the device. A swapped group holds each of its blocks once, however many of its sequences share it. No tensors:
copies are decided here, and the runner carries them out before the forward pass.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.generation.core.step import CopyKind
from penstock.generation.engine.block_pool import BlockClaims, BlockPool
from penstock.generation.engine.host_block import HostBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.generation.core.sequence import Sequence
    from penstock.generation.engine.block_copies import BlockCopies
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.group import SequenceGroup


class HostPool:
    """Host side of a device's block pool. Engine thread only."""

    def __init__(self, config: EngineConfig, device: BlockPool, copies: BlockCopies) -> None:
        """`config.num_host_blocks` is at least 1."""
        groups = config.block_groups
        self.pool = BlockPool(config.num_host_blocks, config.block_size, [group.num_blocks for group in groups])
        # Blocks that callers hold themselves.
        self.claims = BlockClaims(self.pool, "host block")
        # Groups that are swapped.
        self.num_groups = 0
        # Blocks that a store behind this pool reads or fills, and how often.
        self.lent: Counter[int] = Counter()
        # Called with a block and its hash once an evicted prefix will be copied there by the next step.
        self.on_keep: Callable[[int, bytes], None] | None = None
        self._device = device
        self._copies = copies
        # Of a table's held part, of each group; None: there is no bound.
        self._most_blocks = tuple(
            group.most_blocks(config.max_batch_tokens, config.block_size) if group.span else None for group in groups
        )
        if config.host_prefix_cache:
            device.on_evict = self._keep

    def find(self, block_hash: bytes, group: int = 0) -> HostBlock | None:
        """Return the block of a group that holds this prefix, without acquiring it; None when there is none."""
        block = self.pool.lookup(block_hash, group)
        return None if block is None else HostBlock(block, block_hash)

    def lend(self, block: int) -> None:
        """Hold a block for a store until `take_back`."""
        self.pool.acquire(block)
        self.lent[block] += 1

    def lend_empty(self, group: int) -> int:
        """Return a block without content for a store to fill; see `lend`. There must be a free one."""
        block = self.pool.allocate(group)
        self.lent[block] += 1
        return block

    def take_back(self, block: int) -> None:
        """Release a block that was lent."""
        self.pool.release(block)
        self.lent[block] -= 1
        if not self.lent[block]:
            del self.lent[block]

    def forget_lent(self) -> None:
        """Uncache the lent blocks that nobody else holds: `BlockPool.clear_cache` leaves them."""
        for block, count in self.lent.items():
            if self.pool.ref_count(block) == count:
                self.pool.unregister(block)

    def copy_out(self, block: int) -> int:
        """Lend a host block with the content of a device block, which is copied there next unless it is there.

        There must be room for it.
        """
        saved = self._save(block)
        self.lent[saved] += 1
        return saved

    def hold(self, found: HostBlock) -> None:
        """Protect a hit from eviction until it is brought back."""
        self.pool.acquire(found.block)

    def bring(self, found: HostBlock) -> int:
        """Return a device block with the content of a held hit, acquired for one holder; release the hit.

        It takes a free block of the device unless another sequence has brought it meanwhile.
        """
        block = self._bring(found.block, found.block_hash)
        self.pool.release(found.block)
        return block

    def blocks_to_save(self, group: SequenceGroup) -> tuple[int, int]:
        """Return the number of blocks that `swap_out` copies, and of free host blocks that it takes."""
        copied = taken = 0
        for block in _computed_blocks(group, self.pool.block_size):
            known, width = self._known(block), self._device.width(block)
            copied += width if known is None else 0
            taken += width if known is None or self.pool.ref_count(known) == 0 else 0
        return copied, taken

    def swap_out(self, group: SequenceGroup) -> None:
        """Copy all computed blocks of a group to the host. Its block tables stay; they are released next.

        The blocks of `blocks_to_save` must be free.
        """
        self.num_groups += 1
        places: dict[int, int] = {}
        for block in _computed_blocks(group, self.pool.block_size):
            places[block] = self._save(block)
        size = self.pool.block_size
        for sequence in group.sequences:
            if sequence.block_table:
                group.host_tables[sequence] = tuple([places[block] for block in held] for held in _held(sequence, size))

    def blocks_to_return(self, group: SequenceGroup) -> int:
        """Return the number of free device blocks that a swapped group takes, with those for its missing tokens."""
        size = self.pool.block_size
        needed = 0
        for block in self._blocks(group):
            known = self._on_device(block)
            needed += self.pool.width(block) if known is None or self._device.ref_count(known) == 0 else 0
        writers: Counter[int] = Counter()
        for sequence, tables in group.host_tables.items():
            tokens = sequence.num_tokens - sequence.num_draft_tokens
            for number, (table, own) in enumerate(zip(tables, sequence.tables, strict=True)):
                released = _num_released(sequence, table, size)
                missing = self._length_for(number, tokens, released) - released - len(table)
                needed += own.width * max(missing, 0)
                if sequence.num_computed_tokens % size:
                    writers[table[-1]] += 1
        # Of several sequences that write into one block, all but the last copy it first.
        return needed + sum((count - 1) * self.pool.width(block) for block, count in writers.items())

    def swap_in(self, group: SequenceGroup) -> None:
        """Give a swapped group device blocks with its computed content. `blocks_to_return` must be free."""
        held = list(self._blocks(group))
        known = {block: found for block in held if (found := self._on_device(block)) is not None}
        # Before any block is taken: that may evict one of these.
        for found in known.values():
            self._device.acquire(found)
        places = known | {block: self._bring(block, self.pool.hash_of(block)) for block in held if block not in known}
        taken: set[int] = set()
        for sequence, tables in group.host_tables.items():
            for table, own in zip(tables, sequence.tables, strict=True):
                own.num_released = _num_released(sequence, table, self.pool.block_size)
                # They are not read: any block will do.
                own.blocks += [0] * own.num_released
                for block in table:
                    if block in taken:
                        self._device.acquire(places[block])
                    taken.add(block)
                    own.blocks.append(places[block])
        self.forget(group)

    def forget(self, group: SequenceGroup) -> None:
        """Release a swapped group's blocks."""
        self.num_groups -= 1
        for block in reversed(list(self._blocks(group))):
            self.pool.release(block)
        group.host_tables.clear()

    def blocks_of(self, group: SequenceGroup) -> tuple[list[int], list[bytes]]:
        """Return a swapped group's blocks, each once, and the hashes of the cached ones."""
        blocks = list(self._blocks(group))
        return blocks, [found for block in blocks if (found := self.pool.hash_of(block)) is not None]

    def forget_prefixes(self, hashes: Iterable[bytes | None]) -> None:
        """Forget those of these prefixes that nobody holds here."""
        for block_hash in hashes:
            if block_hash is not None:
                self.pool.forget(self.pool.holding(block_hash))

    def disown(self, blocks: Iterable[int]) -> None:
        """Uncache the content of device `blocks`: neither it nor a copy can be trusted."""
        for block in blocks:
            block_hash = self._device.hash_of(block)
            if block_hash is not None:
                self.pool.discard(block_hash)

    def check_integrity(self, groups: Iterable[SequenceGroup]) -> None:
        """Raise AssertionError when the accounting and the swapped groups disagree. O(blocks), for tests."""
        self.pool.check_integrity()
        swapped = [group for group in groups if group.is_swapped]
        assert len(swapped) == self.num_groups, "a swapped group is lost"
        held = Counter(block for group in swapped for block in self._blocks(group))
        held.update(self.claims.blocks)
        held.update(self.lent)
        for block in range(self.pool.num_blocks):
            assert held[block] == self.pool.ref_count(block), "reference count differs from the swapped groups"

    @staticmethod
    def _blocks(group: SequenceGroup) -> dict[int, None]:
        """Return a swapped group's blocks, each once, in order."""
        return {block: None for tables in group.host_tables.values() for table in tables for block in table}

    def _length_for(self, group: int, num_tokens: int, released: int) -> int:
        length, most = -(-num_tokens // self.pool.block_size), self._most_blocks[group]
        return length if most is None else min(length, released + most)

    def _known(self, block: int) -> int | None:
        """Return the host block with the content of a device block, if its hash finds one."""
        block_hash = self._device.hash_of(block)
        return None if block_hash is None else self.pool.lookup(block_hash, self._device.group_of(block))

    def _on_device(self, block: int) -> int | None:
        """Return the device block with the content of a host block, if its hash finds one."""
        block_hash = self.pool.hash_of(block)
        return None if block_hash is None else self._device.lookup(block_hash, self.pool.group_of(block))

    def _save(self, block: int) -> int:
        """Return a host block with the content of a device block, acquired."""
        known = self._known(block)
        if known is not None:
            self.pool.acquire(known)
            return known
        saved = self.pool.allocate(self._device.group_of(block))
        self._copy_out(block, saved)
        block_hash = self._device.hash_of(block)
        if block_hash is not None:
            self.pool.register(saved, block_hash)
        return saved

    def _bring(self, block: int, block_hash: bytes | None) -> int:
        """Return a device block with the content of a held host block, acquired for one holder."""
        group = self.pool.group_of(block)
        known = None if block_hash is None else self._device.lookup(block_hash, group)
        if known is not None:
            self._device.acquire(known)
            return known
        brought = self._device.allocate(group)
        for source, destination in zip(self.pool.bundle(block), self._device.bundle(brought), strict=True):
            self._copies.add(source, destination, CopyKind.IN)
        if block_hash is not None:
            self._device.register(brought, block_hash)
        return brought

    def _copy_out(self, block: int, saved: int) -> None:
        for source, destination in zip(self._device.bundle(block), self.pool.bundle(saved), strict=True):
            self._copies.add(source, destination, CopyKind.OUT)

    def _keep(self, block: int, block_hash: bytes) -> None:
        """Keep a prefix that the device's pool evicts, in place of the least recently used one."""
        group = self._device.group_of(block)
        known = self.pool.lookup(block_hash, group)
        if known is None:
            if self.pool.num_free < self._device.width(block):
                return
            known = self.pool.allocate(group)
            self.pool.register(known, block_hash)
            self._copy_out(block, known)
            if self.on_keep is not None:
                self.on_keep(known, block_hash)
        else:
            self.pool.acquire(known)
        self.pool.release(known)


def _computed_blocks(group: SequenceGroup, size: int) -> dict[int, None]:
    """Return the device blocks with computed tokens of a group, each once, in order."""
    found: dict[int, None] = {}
    for sequence in group.sequences:
        for held in _held(sequence, size):
            found.update(dict.fromkeys(held))
    return found


def _held(sequence: Sequence, size: int) -> list[list[int]]:
    """Return the blocks with computed tokens of a sequence that will be read again, in each group of layers."""
    end = -(-sequence.num_computed_tokens // size)
    return [table.blocks[table.num_released : end] for table in sequence.tables]


def _num_released(sequence: Sequence, table: list[int], size: int) -> int:
    """Return the number of leading blocks of a swapped sequence that were behind a group's window."""
    return -(-sequence.num_computed_tokens // size) - len(table)
