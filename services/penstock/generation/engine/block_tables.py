"""Block tables of sequences: grow, fork, free, and take over blocks of a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.generation.engine.block_pool import BlockPool, chain_hash, root_hash
from penstock.generation.engine.host_pool import HostBlock, HostPool

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sequence import Sequence


# Stands for a leading block that is not read, in a list of blocks; a table may have any block there.
NOT_READ = -1
_ANY = 0


class BlockTables:
    """Keeper of every `Sequence.block_table`, in agreement with the pool. Engine thread only."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        prefix_cache: bool,
        host: HostPool | None = None,
        window: int = 0,
        blocks_of_window: int = 0,
    ) -> None:
        """`host`: a second pool of prefixes for `start`. `window`, `blocks_of_window`: see EngineConfig."""
        self.pool = pool
        self.host = host
        self.prefix_cache = prefix_cache
        self.copied_blocks = 0
        self.window = window
        self._most_blocks = blocks_of_window
        self._block_size = pool.block_size

    def hash_blocks(self, sequence: Sequence, salt: str) -> None:
        """Complete `block_hashes` for all full blocks without drafts. A sequence hashes each token once."""
        self._extend_hashes(sequence, salt, (sequence.num_tokens - sequence.num_draft_tokens) // self._block_size)

    def blocks_to_admit(self, sequence: Sequence, prefix: Seq[int | HostBlock]) -> int:
        """Most blocks by which `start` with this prefix lowers `num_free`."""
        released = _num_released(prefix)
        taken = sum(isinstance(block, HostBlock) or self.pool.ref_count(block) == 0 for block in prefix[released:])
        return self.blocks_for(sequence.num_tokens, released) - len(prefix) + taken

    def blocks_for(self, num_tokens: int, released: int) -> int:
        """Length of a table with room for `num_tokens`, or for the tokens of one step after `released` leading blocks
        that are not held."""
        blocks = -(-num_tokens // self._block_size)
        return min(blocks, released + self._most_blocks) if self.window else blocks

    def start(self, starts: Seq[tuple[Sequence, Seq[int | HostBlock]]]) -> None:
        """Give empty sequences their prefixes and room for all tokens; with a window, room for those of a step.
        The sum of `blocks_to_admit` must be free."""
        # Acquire all prefixes first: room for one sequence may evict cached blocks that are not held yet.
        for _, prefix in starts:
            for block in prefix[_num_released(prefix) :]:
                if isinstance(block, HostBlock):
                    self._brought_by().hold(block)
                else:
                    self.pool.acquire(block)
        for sequence, prefix in starts:
            sequence.num_released_blocks = released = _num_released(prefix)
            sequence.block_table += [_ANY] * released
            for block in prefix[released:]:
                own = self._brought_by().bring(block) if isinstance(block, HostBlock) else block
                sequence.block_table.append(own)
            sequence.num_computed_tokens = len(prefix) * self._block_size
            sequence.num_cached_blocks = len(prefix)
        for sequence, _ in starts:
            blocks = self.blocks_for(sequence.num_tokens, sequence.num_released_blocks)
            self.extend(sequence, blocks * self._block_size)

    def take_over_blocks(self, sequence: Sequence, first: int, blocks: list[int]) -> None:
        """Put `blocks` into the table from place `first` on, the block of the next token to compute.

        They contain the sequence's tokens, or will before they are read. The sequence's own blocks at these places are
        released with their content.
        """
        table = sequence.block_table
        for index, block in enumerate(blocks, first):
            self.pool.acquire(block)
            if index < len(table):
                self.pool.release(table[index])
                table[index] = block
            else:
                table.append(block)
        end = first + len(blocks)
        sequence.num_computed_tokens = end * self._block_size
        if sequence.num_cached_blocks >= first:
            sequence.num_cached_blocks = end
        self.release_behind(sequence)

    def release_behind(self, sequence: Sequence) -> None:
        """Release blocks that no later row reads, even if drafts are rejected. Do nothing without a window."""
        if not self.window:
            return
        kept = min(sequence.num_computed_tokens, sequence.num_tokens - sequence.num_draft_tokens)
        table, first = sequence.block_table, self._first_read(kept)
        while sequence.num_released_blocks < first:
            index = sequence.num_released_blocks
            self.pool.release(table[index])
            table[index] = _ANY
            sequence.num_released_blocks = index + 1

    def can_go_back(self, sequence: Sequence, num_tokens: int) -> bool:
        """True when a sequence, or a fork of it, may go on after `num_tokens` tokens: it holds the blocks to read."""
        released = sequence.num_released_blocks
        return not released or max(num_tokens - self.window + 1, 0) // self._block_size >= released

    def _first_read(self, num_tokens: int) -> int:
        """Return the first block to keep of a sequence with `num_tokens` computed, or one less."""
        return max(num_tokens - self.window, 0) // self._block_size

    def blocks_to_write(self, sequence: Sequence, end: int) -> int:
        """Number of free blocks that `make_writable` up to token `end` takes."""
        return self.blocks_to_extend(sequence, end) + (self._shared_block(sequence) is not None)

    def blocks_to_extend(self, sequence: Sequence, end: int) -> int:
        """Number of free blocks that `extend` up to token `end` takes."""
        return max(-(-end // self._block_size) - len(sequence.block_table), 0)

    def make_writable(self, sequence: Sequence, end: int) -> tuple[int, int] | None:
        """Make room for tokens up to `end` in blocks of its own. Return the (source, destination) to copy, if any.

        Only the block of the first token to compute can be shared: blocks before it are never written again, and a
        fork shares no block after it.
        """
        shared = self._shared_block(sequence)
        copy = None
        if shared is not None:
            source = sequence.block_table[shared]
            copy = (source, self.pool.allocate())
            sequence.block_table[shared] = copy[1]
            self.pool.release(source)
            self.copied_blocks += 1
        self.extend(sequence, end)
        return copy

    def extend(self, sequence: Sequence, end: int) -> None:
        """Make room up to token `end` after this step's `make_writable`; others may share its blocks by now."""
        table = sequence.block_table
        while len(table) * self._block_size < end:
            table.append(self.pool.allocate())

    def fork(self, parent: Sequence, child: Sequence, computed: int) -> None:
        """Let an empty child share the blocks of the parent's first `computed` tokens: both have the same."""
        shared = parent.block_table[: -(-computed // self._block_size)]
        child.num_released_blocks = min(parent.num_released_blocks, len(shared))
        for block in shared[child.num_released_blocks :]:
            self.pool.acquire(block)
        child.block_table.extend(shared)
        child.num_computed_tokens = computed
        child.num_cached_blocks = min(parent.num_cached_blocks, computed // self._block_size)
        if not child.block_hashes:
            child.block_hashes = parent.block_hashes[: computed // self._block_size]

    def give_back(self, sequence: Sequence) -> None:
        """Release every block. The sequence's computed content is in the host pool, or lost."""
        for block in reversed(sequence.held_blocks):
            self.pool.release(block)
        sequence.block_table.clear()
        sequence.num_released_blocks = 0

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
        for index in range(first, last):
            self.pool.register(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_cached_blocks = last

    def disown(self, sequence: Sequence) -> None:
        """Uncache the blocks of a sequence: their content cannot be trusted."""
        if self.host is not None:
            self.host.disown(sequence.held_blocks)
        for block in sequence.held_blocks:
            self.pool.unregister(block)
        for block_hash in sequence.block_hashes[: sequence.num_released_blocks]:
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


def _num_released(prefix: Seq[int | HostBlock]) -> int:
    """Return the number of leading blocks that are not read."""
    if not prefix or prefix[0] != NOT_READ:
        return 0
    return next((index for index, block in enumerate(prefix) if block != NOT_READ), len(prefix))
