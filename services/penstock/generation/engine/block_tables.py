"""The sequences' side of the block pool: grow, fork, free and find prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.generation.engine.block_pool import BlockPool, chain_hash, root_hash

if TYPE_CHECKING:
    from penstock.generation.engine.sequence import Sequence


class BlockTables:
    """Keeps `Sequence.block_table` and the pool in step. Only ever called on the engine thread."""

    def __init__(self, pool: BlockPool, *, prefix_cache: bool) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.copied_blocks = 0
        self._block_size = pool.block_size

    def find_prefix(self, sequence: Sequence, salt: str, max_tokens: int) -> list[int]:
        """Cached blocks that hold the start of `sequence`, at most `max_tokens` of it. Acquires nothing."""
        if not self.prefix_cache:
            return []
        self._extend_hashes(sequence, salt, (sequence.num_tokens - sequence.num_draft_tokens) // self._block_size)
        found: list[int] = []
        for block_hash in sequence.block_hashes[: max(max_tokens, 0) // self._block_size]:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def blocks_to_admit(self, sequence: Sequence, prefix: list[int]) -> int:
        """How far `num_free` sinks when `start` is called with this prefix."""
        revived = sum(self.pool.ref_count(block) == 0 for block in prefix)
        return -(-sequence.num_tokens // self._block_size) - len(prefix) + revived

    def start(self, starts: list[tuple[Sequence, list[int]]]) -> None:
        """Give empty sequences their prefixes and room for all their tokens. `blocks_to_admit` of all must be free."""
        # All prefixes first: room for one sequence may be made of what is cached and not held yet.
        for sequence, prefix in starts:
            for block in prefix:
                self.pool.acquire(block)
            sequence.block_table.extend(prefix)
            sequence.num_computed_tokens = len(prefix) * self._block_size
            sequence.num_cached_blocks = len(prefix)
        for sequence, _ in starts:
            self._extend_table(sequence, sequence.num_tokens)

    def blocks_to_write(self, sequence: Sequence, end: int) -> int:
        """Free blocks that `make_writable` up to token `end` will take."""
        missing = -(-end // self._block_size) - len(sequence.block_table)
        return max(missing, 0) + (self._shared_block(sequence) is not None)

    def make_writable(self, sequence: Sequence, end: int) -> tuple[int, int] | None:
        """Room for tokens up to `end` in blocks of its own; the (source, destination) copy that takes, if any.

        Only the block of the first token to compute can be shared: what lies before it is never written again, and
        a fork shares nothing that lies behind it.
        """
        shared = self._shared_block(sequence)
        copy = None
        if shared is not None:
            source = sequence.block_table[shared]
            copy = (source, self.pool.allocate())
            sequence.block_table[shared] = copy[1]
            self.pool.release(source)
            self.copied_blocks += 1
        self._extend_table(sequence, end)
        return copy

    def fork(self, parent: Sequence, child: Sequence, computed: int) -> None:
        """Let an empty child share what the parent has computed of its first `computed` tokens, the same in both."""
        shared = parent.block_table[: -(-computed // self._block_size)]
        for block in shared:
            self.pool.acquire(block)
        child.block_table.extend(shared)
        child.num_computed_tokens = computed
        child.num_cached_blocks = min(parent.num_cached_blocks, computed // self._block_size)
        if not child.block_hashes:
            child.block_hashes = parent.block_hashes[: computed // self._block_size]

    def free(self, sequence: Sequence) -> None:
        """Give every block back; the sequence has nothing computed any more."""
        for block in reversed(sequence.block_table):
            self.pool.release(block)
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0
        sequence.num_cached_blocks = 0

    def computed(self, sequence: Sequence, salt: str) -> None:
        """More tokens are in the pool: make the blocks they fill findable. Not those with drafts, which may be
        overwritten when the drafts are refused."""
        first, last = sequence.num_cached_blocks, sequence.num_computed_tokens // self._block_size
        if first >= last or not self.prefix_cache:
            return
        last = min(last, (sequence.num_tokens - sequence.num_draft_tokens) // self._block_size)
        self._extend_hashes(sequence, salt, last)
        for index in range(first, last):
            self.pool.register(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_cached_blocks = last

    def _shared_block(self, sequence: Sequence) -> int | None:
        """Index of the block that the next computed token falls into, when others hold that block too."""
        index, offset = divmod(sequence.num_computed_tokens, self._block_size)
        if offset and self.pool.ref_count(sequence.block_table[index]) > 1:
            return index
        return None

    def _extend_table(self, sequence: Sequence, end: int) -> None:
        table = sequence.block_table
        while len(table) * self._block_size < end:
            table.append(self.pool.allocate())

    def _extend_hashes(self, sequence: Sequence, salt: str, num_blocks: int) -> None:
        """Hash the full blocks that are not hashed yet: each token is hashed once in a sequence's life."""
        hashes = sequence.block_hashes
        parent = hashes[-1] if hashes else root_hash(salt)
        for index in range(len(hashes), num_blocks):
            first = index * self._block_size
            parent = chain_hash(parent, sequence.token_ids[first : first + self._block_size])
            hashes.append(parent)
