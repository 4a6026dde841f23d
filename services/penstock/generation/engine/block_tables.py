"""Block tables of sequences: grow, fork, free, and take over blocks of a prefix; in every group of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.common.block_hashes import chain_hash, root_hash
from penstock.generation.core.cache_group import WHOLE, CacheGroup
from penstock.generation.core.sequence import BlockTable
from penstock.generation.engine.block_pool import BlockPool
from penstock.generation.engine.host_block import HostBlock
from penstock.generation.engine.host_pool import HostPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sequence import Sequence


# Stands for a leading block that is not read, in a list of blocks; a table may have any block there.
NOT_READ = -1
_ANY = 0


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """Blocks that hold tokens of a sequence, in each group of layers, from one block of tokens on.

    All lists are as long; one of a group with a span begins with NOT_READ where no later row reads.
    """

    groups: tuple[list[int | HostBlock], ...]

    def __len__(self) -> int:
        """Number of blocks of tokens."""
        return len(self.groups[0])

    def __iter__(self) -> Iterator[int | HostBlock]:
        """Yield every block that is there."""
        for blocks in self.groups:
            yield from (block for block in blocks if block != NOT_READ)


class BlockTables:
    """Keeper of every `Sequence.block_table`, in agreement with the pool. Engine thread only."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        prefix_cache: bool,
        host: HostPool | None = None,
        groups: tuple[CacheGroup, ...] = (WHOLE,),
        rows: int = 0,
    ) -> None:
        """`host`: a second pool of prefixes for `start`. `groups`: of layers; `rows`: most of a step."""
        self.pool = pool
        self.host = host
        self.prefix_cache = prefix_cache
        self.copied_blocks = 0
        # Called with a sequence, its salt, and the range of its blocks that are cached now.
        self.on_cached: list[Callable[[Sequence, str, int, int], None]] = []
        self.groups = groups
        # Those with blocks that are given back, by their numbers.
        self.spans = tuple((number, group) for number, group in enumerate(groups) if group.span)
        self.bundle_blocks = sum(group.num_blocks for group in groups)
        # Most blocks of tokens in a table's held part, of each group; None: there is no bound.
        self._most_blocks = tuple(group.most_blocks(rows, pool.block_size) if group.span else None for group in groups)
        self._block_size = pool.block_size
        # One group, one block a bundle: nearly every model, asked for every row of every step.
        self._is_plain = self.bundle_blocks == 1

    def hash_blocks(self, sequence: Sequence, salt: str) -> None:
        """Complete `block_hashes` for all full blocks without drafts. A sequence hashes each token once."""
        self._extend_hashes(sequence, salt, (sequence.num_tokens - sequence.num_draft_tokens) // self._block_size)

    def blocks_to_admit(self, sequence: Sequence, prefix: FoundPrefix) -> int:
        """Most blocks by which `start` with this prefix lowers `num_free`."""
        needed = 0
        for number, (group, found) in enumerate(zip(self.groups, prefix.groups, strict=True)):
            released = _num_released(found)
            taken = sum(isinstance(block, HostBlock) or self.pool.ref_count(block) == 0 for block in found[released:])
            length = self.length_for(number, sequence.num_tokens, released)
            needed += group.num_blocks * (length - len(found) + taken)
        return needed

    def length_for(self, group: int, num_tokens: int, released: int) -> int:
        """Length of a group's table with room for `num_tokens`, or for the tokens of one step after `released` leading
        blocks that are not held."""
        length, most = -(-num_tokens // self._block_size), self._most_blocks[group]
        return length if most is None else min(length, released + most)

    def open(self, sequence: Sequence) -> tuple[BlockTable, ...]:
        """Return the sequence's tables, which it has from now on."""
        if not sequence.tables:
            first, *others = self.groups
            further = [BlockTable([], group.num_blocks) for group in others]
            sequence.tables = (BlockTable(sequence.block_table, first.num_blocks), *further)
        return sequence.tables

    def start(self, starts: Seq[tuple[Sequence, FoundPrefix]]) -> None:
        """Give empty sequences their prefixes and room for all tokens; in groups with a span, room for those of a step.
        The sum of `blocks_to_admit` must be free."""
        # Acquire all prefixes first: room for one sequence may evict cached blocks that are not held yet.
        for _, prefix in starts:
            for block in prefix:
                if isinstance(block, HostBlock):
                    self._brought_by().hold(block)
                else:
                    self.pool.acquire(block)
        for sequence, prefix in starts:
            for table, found in zip(self.open(sequence), prefix.groups, strict=True):
                table.num_released = released = _num_released(found)
                table.blocks += [_ANY] * released
                for block in found[released:]:
                    own = self._brought_by().bring(block) if isinstance(block, HostBlock) else block
                    table.blocks.append(own)
            sequence.num_computed_tokens = len(prefix) * self._block_size
            sequence.num_cached_blocks = len(prefix)
        for sequence, _ in starts:
            for number, table in enumerate(sequence.tables):
                self._extend(number, table, self.length_for(number, sequence.num_tokens, table.num_released))

    def report_brought(self, sequences: Iterable[Sequence], salt: str) -> None:
        """Report the blocks of sequences that start: some came back from the host pool. O(blocks) where anybody
        hears."""
        for hear in self.on_cached:
            for sequence in sequences:
                hashes = sequence.block_hashes[: sequence.num_cached_blocks]
                # One that was swapped may have blocks that nothing finds.
                lost = (index for index, block_hash in enumerate(hashes) if not self.pool.holding(block_hash))
                hear(sequence, salt, 0, next(lost, len(hashes)))

    def take_over_blocks(self, sequence: Sequence, first: int, prefix: FoundPrefix) -> None:
        """Put found blocks into the tables from place `first` on, the block of the next token to compute.

        They contain the sequence's tokens, or will before they are read. The sequence's own blocks at these places are
        released with their content.
        """
        for table, found in zip(self.open(sequence), prefix.groups, strict=True):
            blocks = table.blocks
            for index, block in enumerate(found, first):
                assert not isinstance(block, HostBlock), "a sequence under way takes no blocks of the host pool"
                if block != NOT_READ:
                    self.pool.acquire(block)
                if index < len(blocks):
                    self.pool.release(blocks[index])
                    blocks[index] = block
                else:
                    blocks.append(block)
            # Blocks of its own before those that are not read are not read either.
            if released := _num_released(found):
                self._release(table, first)
                blocks[first : first + released] = [_ANY] * released
                table.num_released = first + released
        end = first + len(prefix)
        sequence.num_computed_tokens = end * self._block_size
        if sequence.num_cached_blocks >= first:
            sequence.num_cached_blocks = end
        self.release_behind(sequence)

    def release_behind(self, sequence: Sequence) -> None:
        """Release blocks that no later row reads, even if drafts are rejected. Do nothing without a group that has a
        span."""
        if not self.spans:
            return
        kept = min(sequence.num_computed_tokens, sequence.num_tokens - sequence.num_draft_tokens)
        for number, group in self.spans:
            # The row before the next one may be computed again, by a fork.
            self._release(sequence.tables[number], group.first_read(kept - 1) // self._block_size)

    def can_go_back(self, sequence: Sequence, num_tokens: int) -> bool:
        """True when a sequence, or a fork of it, may go on after `num_tokens` tokens: it holds the blocks to read."""
        return not self.spans or all(
            sequence.tables[number].num_released <= group.first_read(num_tokens) // self._block_size
            for number, group in self.spans
            if sequence.tables
        )

    def _release(self, table: BlockTable, first: int) -> None:
        """Release the blocks before place `first`."""
        blocks = table.blocks
        while table.num_released < first:
            self.pool.release(blocks[table.num_released])
            blocks[table.num_released] = _ANY
            table.num_released += 1

    def is_writable(self, sequence: Sequence, end: int) -> bool:
        """True when `make_writable` up to token `end` has nothing to do, as in most steps of decoding."""
        length = -(-end // self._block_size)
        for table in sequence.tables:
            if len(table.blocks) < length:
                return False
        return bool(sequence.tables) and self._shared_block(sequence) is None

    def blocks_to_write(self, sequence: Sequence, end: int) -> int:
        """Number of free blocks that `make_writable` up to token `end` takes."""
        lacking = self.blocks_to_extend(sequence, end)
        return lacking if self._shared_block(sequence) is None else lacking + self.bundle_blocks

    def blocks_to_extend(self, sequence: Sequence, end: int) -> int:
        """Number of free blocks that `extend` up to token `end` takes."""
        length = -(-end // self._block_size)
        if self._is_plain:
            return max(length - len(sequence.block_table), 0)
        # A sequence without tables has no blocks yet.
        tables = sequence.tables or self.open(sequence)
        return sum([table.width * max(length - len(table.blocks), 0) for table in tables])

    def make_writable(self, sequence: Sequence, end: int) -> Seq[tuple[int, int]]:
        """Make room for tokens up to `end` in blocks of its own. Return the (source, destination) to copy, mostly none.

        Only the block of the first token to compute can be shared: blocks before it are never written again, and a
        fork shares no block after it.
        """
        shared = self._shared_block(sequence)
        if shared is None:
            self.extend(sequence, end)
            return ()
        copies: list[tuple[int, int]] = []
        for number, table in enumerate(sequence.tables):
            source, own = table.blocks[shared], self.pool.allocate(number)
            copies += zip(self.pool.bundle(source), self.pool.bundle(own), strict=True)
            table.blocks[shared] = own
            self.pool.release(source)
        self.copied_blocks += len(copies)
        self.extend(sequence, end)
        return copies

    def extend(self, sequence: Sequence, end: int) -> None:
        """Make room up to token `end` after this step's `make_writable`; others may share its blocks by now."""
        length = -(-end // self._block_size)
        if length > len(sequence.block_table) or not self._is_plain:
            for number, table in enumerate(sequence.tables or self.open(sequence)):
                self._extend(number, table, length)

    def _extend(self, number: int, table: BlockTable, length: int) -> None:
        """Make a group's table at least so long."""
        while len(table.blocks) < length:
            table.blocks.append(self.pool.allocate(number))

    def fork(self, parent: Sequence, child: Sequence, computed: int) -> None:
        """Let an empty child share the blocks of the parent's first `computed` tokens: both have the same."""
        length = -(-computed // self._block_size)
        # A parent that never had blocks has no tables.
        for table, own in zip(parent.tables, self.open(child), strict=False):
            shared = table.blocks[:length]
            own.num_released = min(table.num_released, len(shared))
            for block in shared[own.num_released :]:
                self.pool.acquire(block)
            own.blocks.extend(shared)
        child.num_computed_tokens = computed
        child.num_cached_blocks = min(parent.num_cached_blocks, computed // self._block_size)
        if not child.block_hashes:
            child.block_hashes = parent.block_hashes[: computed // self._block_size]

    def give_back(self, sequence: Sequence) -> None:
        """Release every block. The sequence's computed content is in the host pool, or lost."""
        for table in sequence.tables:
            for block in reversed(table.held):
                self.pool.release(block)
            table.blocks.clear()
            table.num_released = 0

    def free(self, sequence: Sequence) -> None:
        """Release every block. The sequence then has no computed tokens."""
        self.give_back(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_cached_blocks = 0

    def computed(self, sequence: Sequence, salt: str) -> None:
        """Cache the blocks that newly computed tokens fill.

        Blocks with drafts are left out: they may be overwritten when the drafts are rejected.
        """
        first, last = sequence.num_cached_blocks, sequence.num_computed_tokens // self._block_size
        if first >= last or not self.prefix_cache:
            return
        last = min(last, (sequence.num_tokens - sequence.num_draft_tokens) // self._block_size)
        self._extend_hashes(sequence, salt, last)
        for table in sequence.tables:
            for index in range(first, last):
                self.pool.register(table.blocks[index], sequence.block_hashes[index])
        sequence.num_cached_blocks = last
        for hear in self.on_cached:
            hear(sequence, salt, first, last)

    def disown(self, sequence: Sequence) -> None:
        """Uncache the blocks of a sequence: their content cannot be trusted."""
        if self.host is not None:
            self.host.disown(sequence.held_blocks)
        for block in sequence.held_blocks:
            self.pool.unregister(block)
        released = max([table.num_released for table in sequence.tables], default=0)
        for block_hash in sequence.block_hashes[:released]:
            self.pool.discard(block_hash)
            if self.host is not None:
                self.host.pool.discard(block_hash)

    def _brought_by(self) -> HostPool:
        assert self.host is not None, "a hit in the host pool, and there is none"
        return self.host

    def _shared_block(self, sequence: Sequence) -> int | None:
        """Return the index of the next token's block when others hold that block too, else None."""
        index, offset = divmod(sequence.num_computed_tokens, self._block_size)
        if offset and self.pool.ref_count(sequence.block_table[index]) > 1:
            return index
        return None

    def _extend_hashes(self, sequence: Sequence, salt: str, num_blocks: int) -> None:
        """Hash the first `num_blocks` blocks, all full, as far as they are not hashed yet."""
        hashes = sequence.block_hashes
        parent = hashes[-1] if hashes else root_hash(salt)
        for index in range(len(hashes), num_blocks):
            parent = chain_hash(parent, sequence.block_content(index, self._block_size))
            hashes.append(parent)


def _num_released(found: Seq[int | HostBlock]) -> int:
    """Return the number of leading blocks that are not read."""
    if not found or found[0] != NOT_READ:
        return 0
    return next((index for index, block in enumerate(found) if block != NOT_READ), len(found))
