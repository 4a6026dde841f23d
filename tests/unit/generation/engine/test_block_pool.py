"""The block pool's accounting, as one state machine and a few named behaviours."""

from __future__ import annotations

import tracemalloc
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule
from penstock.common.block_hashes import chain_hash, root_hash
from penstock.generation.engine import block_pool
from penstock.generation.engine.block_pool import BlockClaims, BlockPool, OutOfBlocks

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """Holders are tokens of one reference each; `model` says what every block must look like."""

    holders: Bundle[int] = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        # The others get their accounts on the way.
        with patch.object(block_pool, "FIRST_BUNDLES", 1):
            self.pool = BlockPool(NUM_BLOCKS, 4)
        self.counts = dict.fromkeys(range(NUM_BLOCKS), 0)

    @rule(target=holders)
    def allocate(self) -> int | MultipleResults[int]:
        if all(self.counts.values()):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate()
            return multiple()
        block = self.pool.allocate()
        assert self.counts[block] == 0
        self.counts[block] = 1
        return block

    @rule(target=holders, block=holders)
    def share(self, block: int) -> int:
        self.pool.acquire(block)
        self.counts[block] += 1
        return block

    @rule(block=consumes(holders))
    def release(self, block: int) -> None:
        self.pool.release(block)
        self.counts[block] -= 1

    @rule(block=holders, content=st.integers(0, 3))
    def register(self, block: int, content: int) -> None:
        known = self.pool.lookup(bytes([content]))
        self.pool.register(block, bytes([content]))
        assert self.pool.lookup(bytes([content])) in ((block, None) if known is None else (known,))

    @rule(target=holders, content=st.integers(0, 3))
    def hit(self, content: int) -> int | MultipleResults[int]:
        block = self.pool.lookup(bytes([content]))
        if block is None:
            return multiple()
        self.pool.acquire(block)
        self.counts[block] += 1
        return block

    @rule()
    def clear_cache(self) -> None:
        before = self.pool.num_evictable
        assert self.pool.clear_cache() == before
        assert self.pool.num_evictable == 0

    @invariant()
    def accounting_is_whole(self) -> None:
        self.pool.check_integrity()
        assert {block: self.pool.ref_count(block) for block in self.counts} == self.counts
        assert self.pool.num_used == sum(count > 0 for count in self.counts.values())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_released_cached_blocks_are_evicted_least_recently_released_first() -> None:
    pool = BlockPool(3, 4)
    blocks = [pool.allocate() for _ in range(3)]
    for name, block in zip(b"abc", blocks, strict=True):
        pool.register(block, bytes([name]))
    for block in (blocks[1], blocks[2], blocks[0]):
        pool.release(block)
    assert pool.allocate() == blocks[1]
    assert pool.lookup(b"b") is None
    assert pool.lookup(b"a") == blocks[0]
    assert pool.evictions == 1


def test_free_blocks_are_taken_before_any_prefix_is_evicted() -> None:
    pool = BlockPool(2, 4)
    cached = pool.allocate()
    pool.register(cached, b"a")
    pool.release(cached)
    pool.allocate()
    assert pool.lookup(b"a") == cached
    assert pool.evictions == 0


def test_releasing_more_often_than_acquired_is_an_error() -> None:
    pool = BlockPool(1, 4)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(block)


def test_a_pool_of_many_blocks_takes_little_memory_before_they_are_used() -> None:
    """Accounts of all of them, made at the start, were 45 MiB of a model with windows."""
    tracemalloc.start()
    try:
        pool = BlockPool(1 << 18, 16, (1, 5))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 1 << 16
    assert pool.num_free == 1 << 18


def test_blocks_are_taken_in_order_and_a_growing_number_of_them_is_told_before() -> None:
    pool, told = BlockPool(100, 4), list[int]()
    pool.on_grow = lambda: told.append(pool.num_used)
    assert [pool.allocate() for _ in range(100)] == list(range(100))
    assert told == [8, 16, 32, 64]
    pool.check_integrity()
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    pool.release(7)
    assert pool.allocate() == 7


def test_any_block_may_be_claimed_and_nobody_holds_one_that_was_never_used() -> None:
    pool, told = BlockPool(100, 4), list[int]()
    pool.on_grow = lambda: told.append(pool.num_used)
    claims = BlockClaims(pool)
    pool.forget_content(70)
    claims.check([70])
    claims.claim([70, 3])
    assert told in ([0], [1])
    assert (pool.num_used, pool.num_free) == (2, 98)
    assert [pool.num_holders(block) for block in (3, 70, 71, 99)] == [1, 1, 0, 0]
    assert [pool.ref_count(block) for block in (70, 99)] == [1, 0]
    pool.check_integrity()
    assert sorted(pool.allocate() for _ in range(98)) == sorted({*range(100)} - {70, 3})


def test_equal_contents_hash_alike_only_after_equal_ones_and_under_an_equal_salt() -> None:
    first = chain_hash(root_hash("a"), b"12")
    assert chain_hash(root_hash("a"), b"12") == first
    assert chain_hash(root_hash("b"), b"12") != first
    assert chain_hash(first, b"12") != first
    assert chain_hash(root_hash("a"), b"21") != first
