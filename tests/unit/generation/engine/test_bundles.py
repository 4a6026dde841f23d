"""Bundles of blocks: groups of layers share one pool, and none of its memory is lost between them."""

from __future__ import annotations

import pytest
from factories.engine.fake_engine import engine_config, make_engine, request, run
from penstock.generation.core.cache_group import CacheGroup
from penstock.generation.engine.block_pool import BlockPool, OutOfBlocks
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.prefix_search import find_read

PROMPT = list(range(10, 50))


def mixed(**changes: int) -> EngineConfig:
    """Return the configuration of a model with 1 block for layers that read all, and 3 for a window of 9."""
    groups = (CacheGroup(1), CacheGroup(3, window=9))
    fields = {"block_size": 4, "num_blocks": 60, "max_batch_tokens": 8, "max_running_sequences": 4}
    return engine_config(groups=groups, **{**fields, **changes})


def test_a_bundle_is_one_block_to_its_holders_and_several_to_the_pool() -> None:
    pool = BlockPool(7, 4, (1, 3))
    one, three = pool.allocate(0), pool.allocate(1)
    assert (pool.width(one), pool.width(three)) == (1, 3)
    assert pool.bundle(three)[0] == three
    assert (pool.num_used, pool.num_free, pool.used_by_group) == (4, 3, (1, 3))
    within = pool.bundle(three)[1]
    assert (pool.ref_count(within), pool.num_holders(within)) == (0, 1)
    pool.check_integrity()
    pool.release(three)
    assert pool.num_free == 6
    pool.check_integrity()


def test_free_blocks_of_one_group_serve_another() -> None:
    pool = BlockPool(6, 4, (1, 3))
    singles = [pool.allocate(0) for _ in range(6)]
    for block in singles[::2]:
        pool.release(block)
    # Three blocks that are not neighbours.
    assert sorted(pool.bundle(pool.allocate(1))) == sorted(singles[::2])
    with pytest.raises(OutOfBlocks):
        pool.allocate(0)


def test_a_bundle_evicts_as_many_prefixes_as_it_needs() -> None:
    pool = BlockPool(4, 4, (1, 3))
    evicted = []
    pool.on_evict = lambda block, block_hash: evicted.append(block_hash)
    for name in (b"a", b"b", b"c", b"d"):
        block = pool.allocate(0)
        pool.register(block, name)
        pool.release(block)
    pool.allocate(1)
    assert evicted == [b"a", b"b", b"c"]
    assert pool.lookup(b"d") is not None
    pool.check_integrity()


def test_a_prefix_is_found_in_the_group_that_holds_it() -> None:
    pool = BlockPool(8, 4, (1, 3))
    one, three = pool.allocate(0), pool.allocate(1)
    pool.register(one, b"x")
    pool.register(three, b"x")
    assert (pool.lookup(b"x", 0), pool.lookup(b"x", 1)) == (one, three)
    assert sorted(pool.holding(b"x")) == sorted((one, three))
    pool.release(three)
    pool.forget_content(pool.bundle(three)[2])
    assert pool.lookup(b"x", 0) is None
    assert pool.num_evictable == 0
    pool.check_integrity()


def test_a_claim_of_a_block_within_an_unused_bundle_frees_the_others() -> None:
    pool = BlockPool(3, 4, (1, 3))
    three = pool.allocate(1)
    pool.register(three, b"x")
    pool.release(three)
    pool.claim(pool.bundle(three)[1])
    assert (pool.num_used, pool.num_free) == (1, 2)
    assert pool.lookup(b"x", 1) is None
    pool.check_integrity()


def test_windows_of_a_mixed_model_free_blocks_behind_themselves() -> None:
    config = mixed()
    engine, _ = make_engine(config)
    item = request(PROMPT, max_new_tokens=30)
    engine.check(item)
    engine.add(item)
    while engine.has_work:
        engine.step()
        for group in engine._groups.values():
            for sequence in group.sequences:
                whole, window = sequence.tables
                assert whole.num_released == 0
                assert len(window.held) <= config.block_groups[1].most_blocks(8, 4) == 5
    # 69 computed tokens are 18 blocks, and 5 bundles of 3; with whole contexts everywhere they would be 72 blocks.
    assert config.blocks_needed(40, 30, 1) == 18 + 3 * 5


def test_a_prefix_hit_needs_the_whole_chain_of_one_group_and_the_last_window_of_another() -> None:
    engine, _ = make_engine(mixed(num_blocks=200))
    run(engine, request(PROMPT, max_new_tokens=1))
    pool = engine._scheduler.pool
    engine.add(item := request(PROMPT, max_new_tokens=1))
    group = engine._groups[item.request_id]
    engine._scheduler.tables.hash_blocks(group.sequences[0], group.block_salt)
    hashes = list(group.sequences[0].block_hashes)
    run(engine)

    def lose(block_hash: bytes, number: int) -> None:
        block = pool.lookup(block_hash, number)
        assert block is not None
        pool.forget([block])

    def hits() -> int:
        before = engine.stats.prefix_hit_tokens
        run(engine, request([*PROMPT, 1], max_new_tokens=1))
        engine.check_integrity()
        return engine.stats.prefix_hit_tokens - before

    # Windows behind the last two blocks are read by nobody.
    for block_hash in hashes[:8]:
        lose(block_hash, 1)
    assert hits() == 40
    lose(hashes[9], 1)
    assert hits() == 0
    lose(hashes[3], 0)
    assert hits() == 12


def test_the_search_asks_for_each_block_once() -> None:
    groups = (CacheGroup(), CacheGroup(2, window=9), CacheGroup(1, chunk=8))
    asked = []
    missing = {(9, 0), (7, 1), (5, 2)}

    def block_of(index: int, group: int) -> int | None:
        asked.append((index, group))
        return None if (index, group) in missing else 100 * group + index

    found = find_read(groups, 4, 0, 12, block_of)
    # Block 9 of the first group is missing, so is 7 of the second. The row after block 6 reads 5 and 6, or 6 alone.
    nothing = [None] * 5
    assert found == ([0, 1, 2, 3, 4, 5, 6], [*nothing, 105, 106], [*nothing, None, 206])
    assert len(asked) == len(set(asked))
