"""Accounting of the KV pool: blocks that are free, shared, kept as a reusable prefix, or a caller's own. No tensors."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from penstock.common.errors import FailedPrecondition, InvalidArgument

_DOMAIN = b"penstock.prefix.v1\0"
# Most blocks that an error names.
_MOST_NAMED = 8


def root_hash(salt: str) -> bytes:
    """Return the hash before the first block. Prefixes are shared only under an equal salt (one per tenant)."""
    return hashlib.sha256(_DOMAIN + salt.encode()).digest()


def chain_hash(parent: bytes, content: bytes) -> bytes:
    """Return the hash of one full block after `parent`: equal iff all contents up to its end, and salts, are equal."""
    return hashlib.sha256(parent + content).digest()


class OutOfBlocks(Exception):
    """Error of `allocate` without a free block: the caller did not check `num_free`."""


class BlockPool:
    """Reference counts and prefix hashes of `num_blocks` blocks of `block_size` tokens.

    A block is in exactly one state: *used* (reference count above 0), *free*, or *evictable* (count 0, but a prefix
    hit may bring it back). When no free block is left, the least recently used evictable block is taken. Every
    operation is O(1) unless it says otherwise.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions = 0
        # Called with a block and its hash before the block loses its prefix to another use.
        self.on_evict: Callable[[int, bytes], None] | None = None
        # Called with a hash that finds no block any more.
        self.on_forget: Callable[[bytes], None] | None = None
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can still hand out, evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Number of unused blocks that hold a reusable prefix."""
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        """Number of blocks that sequences hold."""
        return self.num_blocks - self.num_free

    def ref_count(self, block: int) -> int:
        """Number of block tables that hold `block`."""
        return self._ref_counts[block]

    def allocate(self) -> int:
        """Take a block, with reference count 1 and no hash. Raises OutOfBlocks."""
        if self._free:
            block = self._free.pop()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            block_hash = self._hashes[block]
            if self.on_evict is not None and block_hash is not None:
                self.on_evict(block, block_hash)
            self._forget(block)
            self.evictions += 1
        else:
            raise OutOfBlocks
        self._ref_counts[block] = 1
        return block

    @property
    def num_references(self) -> int:
        """Sum of all reference counts. O(blocks)."""
        return sum(self._ref_counts)

    def acquire(self, block: int) -> None:
        """Count one more holder of a used or evictable block."""
        if self._ref_counts[block] == 0:
            del self._evictable[block]
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Count one holder less. A block without a holder is evictable when it is cached, and free otherwise.

        Release a sequence's blocks from the last to the first, so that the deepest prefix is evicted first.
        """
        count = self._ref_counts[block] - 1
        if count < 0:
            raise ValueError(f"block {block} released more often than acquired")
        self._ref_counts[block] = count
        if count:
            return
        if self._hashes[block] is None:
            self._free.append(block)
        else:
            self._evictable[block] = None

    def hash_of(self, block: int) -> bytes | None:
        """Hash that finds `block`; None: it is not cached."""
        return self._hashes[block]

    def claim(self, block: int) -> None:
        """Take this very block, with reference count 1 and no hash. O(free blocks).

        Raises OutOfBlocks when somebody holds it.
        """
        if self._ref_counts[block]:
            raise OutOfBlocks
        if block in self._evictable:
            del self._evictable[block]
            self._forget(block)
        else:
            self._free.remove(block)
        self._ref_counts[block] = 1

    def forget(self, blocks: Iterable[int]) -> int:
        """Uncache those of `blocks` that nobody holds. Return the number of these, cached or not."""
        unused = [block for block in blocks if not self._ref_counts[block]]
        for block in unused:
            if block in self._evictable:
                del self._evictable[block]
                self._forget(block)
                self._free.append(block)
        return len(unused)

    def lookup(self, block_hash: bytes) -> int | None:
        """Return the block that holds this prefix, without acquiring it; None when there is none."""
        return self._cached.get(block_hash)

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a used, full and computed block findable. A prefix that another block holds stays there."""
        if block_hash not in self._cached and self._hashes[block] is None:
            self._cached[block_hash] = block
            self._hashes[block] = block_hash

    def unregister(self, block: int) -> None:
        """Uncache a used block: its content does not match its prefix. Its holders keep it."""
        self._forget(block)

    def discard(self, block_hash: bytes) -> None:
        """Uncache a prefix; a block that nobody holds is then free. Do nothing if the prefix is not cached."""
        block = self._cached.get(block_hash)
        if block is None:
            return
        self._forget(block)
        if block in self._evictable:
            del self._evictable[block]
            self._free.append(block)

    def clear_cache(self) -> int:
        """Forget every prefix that no sequence holds, and return the number of its blocks."""
        cleared = len(self._evictable)
        for block in self._evictable:
            self._forget(block)
            self._free.append(block)
        self._evictable.clear()
        return cleared

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. O(blocks), for tests and after a failure."""
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & evictable, "a block is free and evictable"
        for block, count in enumerate(self._ref_counts):
            assert count >= 0, "negative reference count"
            assert (count == 0) == (block in free or block in evictable), "used and free at once, or neither"
        for block, block_hash in enumerate(self._hashes):
            assert block_hash is None or self._cached.get(block_hash) == block, "hash without cache entry"
            assert block not in free or block_hash is None, "free block with a hash"
            assert block not in evictable or block_hash is not None, "evictable block without a hash"
        assert len(self._cached) == sum(h is not None for h in self._hashes), "cache entry without block"

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hashes[block] = None
            if self.on_forget is not None:
                self.on_forget(block_hash)


class BlockClaims:
    """Blocks that callers hold by number: no request gets one until it is released. Engine thread only.

    Blocks of the device's pool can be claimed only while no request is live: a claim would take the room that a request
    was accepted for. So no claim makes a request wait for ever, and no request finds its blocks overwritten. No request
    needs a block of the host pool.
    """

    def __init__(self, pool: BlockPool, noun: str = "block") -> None:
        """`noun` is the word for a block in errors."""
        self._pool = pool
        self._noun = noun
        self._blocks: set[int] = set()

    @property
    def blocks(self) -> frozenset[int]:
        """The claimed blocks."""
        return frozenset(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def missing(self, blocks: Iterable[int], field: str) -> set[int]:
        """Return those of `blocks` that are not claimed yet. Raises InvalidArgument naming `field` for numbers that the
        pool does not have."""
        wanted = set(blocks)
        if any(not 0 <= block < self._pool.num_blocks for block in wanted):
            raise InvalidArgument(field, f"every {self._noun} must be from 0 to {self._pool.num_blocks - 1}")
        return wanted - self._blocks

    def check(self, blocks: Iterable[int]) -> None:
        """Raise FailedPrecondition naming those of `blocks`, which are not claimed yet, that a request holds."""
        held = [block for block in blocks if self._pool.ref_count(block)]
        if held:
            raise FailedPrecondition(
                f"{_named(held, self._noun)}: a request of the engine holds it", reason="BLOCK_IN_USE"
            )

    def claim(self, blocks: Collection[int]) -> None:
        """Take blocks that are not claimed yet, all or none; cached prefixes in them are forgotten. Raises as
        `check`."""
        self.check(blocks)
        for block in blocks:
            self._pool.claim(block)
        self._blocks.update(blocks)

    def release(self, blocks: Iterable[int] | None = None) -> int:
        """Release blocks, None: all of them; unclaimed ones are ignored. Return the number of released ones."""
        given_back = set(self._blocks) if blocks is None else self._blocks.intersection(blocks)
        for block in given_back:
            self._pool.release(block)
        self._blocks -= given_back
        return len(given_back)


class HeldPrefixes:
    """Prefixes that callers in this process hold: their blocks are never evicted. Engine thread only."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._holders: Counter[int] = Counter()

    @property
    def holders(self) -> Counter[int]:
        """Number of handles that hold each block."""
        return self._holders

    def __len__(self) -> int:
        """Number of blocks that are held."""
        return len(self._holders)

    def find(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Return the blocks of the computed prefix of `token_ids`. O(blocks)."""
        size, found = self._pool.block_size, []
        parent = root_hash(salt)
        for index in range(len(token_ids) // size):
            parent = chain_hash(parent, array("I", token_ids[index * size : (index + 1) * size]).tobytes())
            block = self._pool.lookup(parent)
            if block is None:
                break
            found.append(block)
        return found

    def num_shared(self, token_ids: Sequence[int], salt: str) -> int:
        """Return the number of leading blocks of `token_ids` that are held: a request takes them over. O(blocks).

        It reads only, so any thread may call it.
        """
        found = self.find(token_ids, salt) if self._holders else ()
        return next((place for place, block in enumerate(found) if block not in self._holders), len(found))

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks, each once more."""
        for block in blocks:
            self._pool.acquire(block)
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Release the blocks of one handle, the last first, so that the deepest prefix is evicted first."""
        for block in reversed(blocks):
            self._pool.release(block)
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]


def _named(blocks: Collection[int], noun: str) -> str:
    shown = ", ".join(str(block) for block in sorted(blocks)[:_MOST_NAMED])
    return f"{noun}{'' if len(blocks) == 1 else 's'} {shown}{', …' if len(blocks) > _MOST_NAMED else ''}"
