"""Accounting of the KV pool: blocks that are free, shared, kept as a reusable prefix, or a caller's own. No tensors."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from penstock.common.block_hashes import chain_hash, root_hash
from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.generation.core.cache_group import FIRST_BUNDLES, WHOLE, CacheGroup
from penstock.generation.engine.prefix_search import find_read

# Most blocks that an error names.
_MOST_NAMED = 8
# Most blocks that get an account at a time.
_MOST_AT_A_TIME = 4096


class OutOfBlocks(Exception):
    """Error of `allocate` without a free block: the caller did not check `num_free`."""


class BlockPool:
    """Reference counts and prefix hashes of `num_blocks` blocks of `block_size` tokens.

    Blocks get their accounts as they are first needed, in the order of their numbers: the accounts of 262,144 blocks
    are 45 MiB of objects.

    A block is in exactly one state: *used* (reference count above 0), *free*, or *evictable* (count 0, but a prefix
    hit may bring it back). When no free block is left, the least recently used evictable block is taken. Every
    operation is O(1) unless it says otherwise.

    Groups of layers share the blocks. Where a group takes several for the same tokens, they are a bundle: the first
    of them stands for all, has the count and the hash, and the others share its state. Any free blocks can be a bundle,
    so none is lost between groups.
    """

    def __init__(self, num_blocks: int, block_size: int, widths: Sequence[int] = (1,)) -> None:
        """`widths`: blocks of a bundle of each group."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Blocks of each bundle, by the first of them; None: every bundle is one block. Read only.
        self.bundles: list[tuple[int, ...]] | None = [] if max(widths) > 1 else None
        self._widths = tuple(widths)
        # Group of each used or evictable bundle, and the bundle of each of its blocks, by the first.
        self._groups: list[int] = []
        self._heads: list[int] = []
        self.evictions = 0
        # Called with a block and its hash before the block loses its prefix to another use.
        self.on_evict: Callable[[int, bytes], None] | None = None
        # Called with a hash that finds a block of a group from now on, and with one that finds none there any more.
        self.on_register: list[Callable[[bytes], None]] = []
        self.on_forget: list[Callable[[bytes], None]] = []
        # Called now and then before more blocks are used than ever, and first before one beyond FIRST_BUNDLES is.
        self.on_grow: Callable[[], None] | None = None
        self._ref_counts: list[int] = []
        self._hashes: list[bytes | None] = []
        # Of each group.
        self._cached: tuple[dict[bytes, int], ...] = tuple({} for _ in widths)
        self._used = [0] * len(widths)
        self._free: list[int] = []
        # Number of blocks that have no account yet, and are free.
        self._num_fresh = num_blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()
        # Blocks of evictable bundles.
        self._num_evictable = 0
        self._grow(FIRST_BUNDLES * sum(widths))

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can still hand out, evictable ones included."""
        return len(self._free) + self._num_fresh + self._num_evictable

    @property
    def num_evictable(self) -> int:
        """Number of unused blocks that hold a reusable prefix."""
        return self._num_evictable

    @property
    def used_by_group(self) -> tuple[int, ...]:
        """Number of blocks that sequences hold for each group of layers."""
        return tuple(self._used)

    def bundle(self, block: int) -> tuple[int, ...]:
        """Blocks of the bundle that begins with `block`."""
        return (block,) if self.bundles is None else self.bundles[block]

    def width(self, block: int) -> int:
        """Number of blocks of the bundle that begins with `block`."""
        return 1 if self.bundles is None else len(self.bundles[block])

    def group_of(self, block: int) -> int:
        """Group of layers of a used or evictable bundle."""
        return self._groups[block]

    @property
    def num_used(self) -> int:
        """Number of blocks that sequences hold."""
        return self.num_blocks - self.num_free

    def ref_count(self, block: int) -> int:
        """Number of block tables that hold the bundle that begins with `block`."""
        return self._ref_counts[block] if block < len(self._ref_counts) else 0

    def num_holders(self, block: int) -> int:
        """Number of block tables that hold `block`, whatever its place in a bundle."""
        return self._ref_counts[self._heads[block]] if block < len(self._heads) else 0

    def allocate(self, group: int = 0) -> int:
        """Take a bundle for a group, with reference count 1 and no hash. Raises OutOfBlocks.

        A bundle of several blocks takes O(its blocks), and as many evictions as it needs.
        """
        width = self._widths[group]
        while len(self._free) < width:
            if self._num_fresh:
                self._grow()
            elif self._evictable:
                self._evict()
            else:
                raise OutOfBlocks
        block = self._free.pop()
        if self.bundles is not None:
            bundle = (block, *(self._free.pop() for _ in range(width - 1)))
            self.bundles[block] = bundle
            for one in bundle:
                self._heads[one] = block
        self._groups[block] = group
        self._ref_counts[block] = 1
        self._used[group] += width
        return block

    @property
    def num_references(self) -> int:
        """Sum of all reference counts. O(blocks)."""
        return sum(self._ref_counts)

    def acquire(self, block: int) -> None:
        """Count one more holder of a used or evictable bundle."""
        if self._ref_counts[block] == 0:
            del self._evictable[block]
            width = self.width(block)
            self._num_evictable -= width
            self._used[self._groups[block]] += width
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Count one holder less. A bundle without a holder is evictable when it is cached, and free otherwise.

        Release a sequence's blocks from the last to the first, so that the deepest prefix is evicted first.
        """
        count = self._ref_counts[block] - 1
        if count < 0:
            raise ValueError(f"block {block} released more often than acquired")
        self._ref_counts[block] = count
        if count:
            return
        width = self.width(block)
        self._used[self._groups[block]] -= width
        if self._hashes[block] is None:
            self._set_free(block)
        else:
            self._evictable[block] = None
            self._num_evictable += width

    def hash_of(self, block: int) -> bytes | None:
        """Hash that finds `block`; None: it is not cached."""
        return self._hashes[block] if block < len(self._hashes) else None

    def claim(self, block: int) -> None:
        """Take this very block, with reference count 1 and no hash. O(free blocks and those before it).

        Raises OutOfBlocks when somebody holds it.
        """
        if self.num_holders(block):
            raise OutOfBlocks
        if block >= len(self._heads):
            self._grow(block + 1)
        self._drop(self._heads[block])
        self._free.remove(block)
        self._groups[block] = 0
        self._ref_counts[block] = 1
        self._used[0] += 1

    def forget(self, blocks: Iterable[int]) -> int:
        """Uncache those of these bundles that nobody holds. Return the number of their blocks, cached or not."""
        unused = [block for block in blocks if not self._ref_counts[block]]
        num_blocks = sum(self.width(block) for block in unused)
        for block in unused:
            self._drop(block)
        return num_blocks

    def forget_content(self, block: int) -> None:
        """Uncache the bundle of `block`, whatever its place in it: its content is not what it was."""
        block_hash = self._hashes[self._heads[block]] if block < len(self._heads) else None
        if block_hash is not None:
            self.discard(block_hash)

    def lookup(self, block_hash: bytes, group: int = 0) -> int | None:
        """Return the bundle of a group that holds this prefix, without acquiring it; None when there is none."""
        return self._cached[group].get(block_hash)

    def cached_blocks(self) -> list[tuple[int, bytes]]:
        """Return all cached bundles with their hashes: held ones, then the last released first. O(blocks)."""
        held = [block for block, count in enumerate(self._ref_counts) if count]
        pairs = ((block, self._hashes[block]) for block in (*held, *reversed(self._evictable)))
        return [(block, block_hash) for block, block_hash in pairs if block_hash is not None]

    def holding(self, block_hash: bytes) -> list[int]:
        """Return the bundles of all groups that hold this prefix."""
        return [block for cached in self._cached if (block := cached.get(block_hash)) is not None]

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a used, full and computed bundle findable. A prefix that another one holds stays there."""
        cached = self._cached[self._groups[block]]
        if block_hash not in cached and self._hashes[block] is None:
            cached[block_hash] = block
            self._hashes[block] = block_hash
            for hear in self.on_register:
                hear(block_hash)

    def unregister(self, block: int) -> None:
        """Uncache a used bundle: its content does not match its prefix. Its holders keep it."""
        self._forget(block)

    def discard(self, block_hash: bytes) -> None:
        """Uncache a prefix in every group; blocks that nobody holds are then free. Do nothing if it is not cached."""
        for cached in self._cached:
            block = cached.get(block_hash)
            if block is not None and not self._drop(block):
                self._forget(block)

    def clear_cache(self) -> int:
        """Forget every prefix that no sequence holds, and return the number of its blocks."""
        cleared = self._num_evictable
        for block in list(self._evictable):
            self._drop(block)
        return cleared

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. O(blocks), for tests and after a failure."""
        free, evictable = set(self._free), set(self._evictable)
        assert len(self._ref_counts) + self._num_fresh == self.num_blocks, "blocks are miscounted"
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & evictable, "a block is free and evictable"
        assert self._num_evictable == sum(map(self.width, evictable)), "evictable blocks are miscounted"
        used = [0] * len(self._widths)
        for block, count in enumerate(self._ref_counts):
            assert count >= 0, "negative reference count"
            head = self._heads[block]
            if head != block:
                assert block in self.bundle(head), "a block is not in its bundle"
                assert not count, "a block within a bundle has holders of its own"
                assert block not in free, "a block of a bundle is free"
                assert self._ref_counts[head] or head in evictable, "a bundle that is free has blocks"
                continue
            assert (count == 0) == (block in free or block in evictable), "used and free at once, or neither"
            used[self._groups[block]] += self.width(block) if count else 0
        assert used == self._used, "used blocks are miscounted"
        for block, block_hash in enumerate(self._hashes):
            found = None if block_hash is None else self._cached[self._groups[block]].get(block_hash)
            assert block_hash is None or found == block, "hash without cache entry"
            assert block not in free or block_hash is None, "free block with a hash"
            assert block not in evictable or block_hash is not None, "evictable block without a hash"
        cached = sum(map(len, self._cached))
        assert cached == sum(h is not None for h in self._hashes), "cache entry without block"

    def _grow(self, least: int = 0) -> None:
        """Make the accounts of more blocks, of the first `least` and of twice as many as have one. These are free, and
        are taken after the others that are."""
        first = len(self._ref_counts)
        last = min(self.num_blocks, max(least, first + min(first, _MOST_AT_A_TIME)))
        new = range(first, last)
        self._groups += [0] * len(new)
        self._heads += new
        self._ref_counts += [0] * len(new)
        self._hashes += [None] * len(new)
        if self.bundles is not None:
            self.bundles += [(block,) for block in new]
        self._free[:0] = reversed(new)
        self._num_fresh -= len(new)
        if self.on_grow is not None:
            self.on_grow()

    def _evict(self) -> None:
        """Free the least recently used evictable bundle."""
        block = next(iter(self._evictable))
        block_hash = self._hashes[block]
        if self.on_evict is not None and block_hash is not None:
            self.on_evict(block, block_hash)
        self._drop(block)
        self.evictions += 1

    def _drop(self, block: int) -> bool:
        """Free an evictable bundle. False: it is none."""
        if block not in self._evictable:
            return False
        del self._evictable[block]
        self._num_evictable -= self.width(block)
        self._forget(block)
        self._set_free(block)
        return True

    def _set_free(self, block: int) -> None:
        if self.bundles is None:
            self._free.append(block)
            return
        bundle = self.bundles[block]
        for one in bundle:
            self._heads[one] = one
        self._free.extend(reversed(bundle))
        self.bundles[block] = (block,)

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._cached[self._groups[block]][block_hash]
            self._hashes[block] = None
            for hear in self.on_forget:
                hear(block_hash)


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
        held = [block for block in blocks if self._pool.num_holders(block)]
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

    def __init__(self, pool: BlockPool, groups: tuple[CacheGroup, ...] = (WHOLE,)) -> None:
        self._pool = pool
        self._groups = groups
        self._holders: Counter[int] = Counter()

    @property
    def holders(self) -> Counter[int]:
        """Number of handles that hold each bundle."""
        return self._holders

    def __len__(self) -> int:
        """Number of blocks that are held."""
        return sum(map(self._pool.width, self._holders))

    def find(self, token_ids: Sequence[int], salt: str) -> tuple[list[int], int]:
        """Return the blocks of the computed prefix of `token_ids` from which a request can go on, in every group of
        layers, and the number of its tokens. O(blocks)."""
        size, hashes = self._pool.block_size, [root_hash(salt)]
        for index in range(len(token_ids) // size):
            content = array("I", token_ids[index * size : (index + 1) * size]).tobytes()
            hashes.append(chain_hash(hashes[-1], content))
        found = find_read(
            self._groups, size, 0, len(hashes) - 1, lambda index, group: self._pool.lookup(hashes[index + 1], group)
        )
        return [block for blocks in found for block in blocks if isinstance(block, int)], len(found[0]) * size

    def num_shared(self, token_ids: Sequence[int], salt: str) -> int:
        """Return the number of leading blocks of `token_ids` that are held: a request takes them over. O(blocks).

        It reads only, so any thread may call it.
        """
        found = self.find(token_ids, salt)[0] if self._holders else ()
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
