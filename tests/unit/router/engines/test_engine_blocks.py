"""Cache events of another engine become the names that a router makes of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from penstock.engines.smg_common_pb2 import KvBlock, KvBlocksRemoved, KvBlocksStored, KvCacheCleared, KvCacheEvent
from penstock.engines.smg_common_pb2 import KvEventBatch as Batch
from penstock.router.backends.prefix_index import PrefixIndex, routing_hashes
from penstock.router.engines.engine_blocks import EngineBlocks

SIZE = 4
PROMPT = list(range(20))
NAMES = routing_hashes(PROMPT, SIZE, "", 100)


def stored(hashes: Sequence[int], first: int = 0, parent: int | None = None, **fields: int) -> KvCacheEvent:
    """Blocks of the prompt from block `first` on, by the engine's own hashes."""
    blocks = [
        KvBlock(block_hash=one, token_ids=PROMPT[place * SIZE : (place + 1) * SIZE], block_size=SIZE, **fields)
        for place, one in enumerate(hashes, first)
    ]
    return KvCacheEvent(stored=KvBlocksStored(blocks=blocks, parent_block_hash=parent))


def removed(*hashes: int, **fields: int) -> KvCacheEvent:
    return KvCacheEvent(removed=KvBlocksRemoved(block_hashes=hashes, **fields))


def matched(blocks: EngineBlocks, index: PrefixIndex) -> int:
    """Leading blocks of the prompt that a router knows after the changes."""
    told = blocks.changes()
    if told is not None:
        index.take(told.kept, told.gone, begins_anew=told.begins_anew)
    return index.match(NAMES)


def test_blocks_have_the_names_of_the_prompt_and_go_when_they_are_removed() -> None:
    blocks, index = EngineBlocks(SIZE, 100), PrefixIndex(100)
    blocks.take(Batch(sequence_number=1, events=[stored([-7, 8])]))
    assert matched(blocks, index) == 2
    assert blocks.changes() is None
    blocks.take(Batch(sequence_number=2, events=[stored([9, 10, 11], 2, parent=8), removed(11)]))
    assert matched(blocks, index) == 4
    blocks.take(Batch(sequence_number=3, events=[removed(8), stored([8], 1, parent=-7), removed(9)]))
    assert matched(blocks, index) == 2
    blocks.take(Batch(sequence_number=4, events=[KvCacheEvent(cleared=KvCacheCleared())]))
    assert (matched(blocks, index), len(blocks)) == (0, 0)
    blocks.take(Batch(sequence_number=5, events=[stored([1])]))
    assert matched(blocks, index) == 1


def test_a_block_that_is_there_twice_goes_with_its_last_copy() -> None:
    """An engine that computes one prompt for two requests at once has it twice, and tells both."""
    blocks, index = EngineBlocks(SIZE, 100), PrefixIndex(100)
    blocks.take(Batch(sequence_number=1, events=[stored([7, 8]), stored([7, 8])]))
    blocks.take(Batch(sequence_number=2, events=[removed(8)]))
    assert matched(blocks, index) == 2
    blocks.take(Batch(sequence_number=3, events=[removed(8)]))
    assert matched(blocks, index) == 1


def test_a_prompt_of_two_engine_processes_goes_when_both_have_forgotten_it() -> None:
    """Behind one address each has hashes of its own."""
    blocks, index = EngineBlocks(SIZE, 100), PrefixIndex(100)
    blocks.take(Batch(sequence_number=1, dp_rank=0, events=[stored([7])]))
    blocks.take(Batch(sequence_number=1, dp_rank=1, events=[stored([70])]))
    blocks.take(Batch(sequence_number=2, dp_rank=0, events=[removed(7)]))
    assert matched(blocks, index) == 1
    blocks.take(Batch(sequence_number=2, dp_rank=1, events=[removed(70)]))
    assert matched(blocks, index) == 0


@pytest.mark.parametrize("own", [1, 2, 3, 8, 20])
def test_an_engine_may_have_blocks_of_any_size(own: int) -> None:
    """SGLang has pages of one token, vLLM on a CPU blocks of 128."""
    blocks, index = EngineBlocks(SIZE, 100), PrefixIndex(100)
    ends = range(own, len(PROMPT) + 1, own)
    cut = [KvBlock(block_hash=1000 + end, token_ids=PROMPT[end - own : end], block_size=own) for end in ends]
    half = len(cut) // 2
    blocks.take(Batch(sequence_number=1, events=[KvCacheEvent(stored=KvBlocksStored(blocks=cut[:half]))]))
    assert matched(blocks, index) == half * own // SIZE
    parent = 1000 + half * own if half else None
    rest = KvCacheEvent(stored=KvBlocksStored(blocks=cut[half:], parent_block_hash=parent))
    blocks.take(Batch(sequence_number=2, events=[rest]))
    assert matched(blocks, index) == len(cut) * own // SIZE
    blocks.take(Batch(sequence_number=3, events=[removed(1000 + len(cut) * own)]))
    assert matched(blocks, index) == (len(cut) - 1) * own // SIZE


def test_batches_whose_events_are_all_left_out_make_no_gap() -> None:
    """Of a model with several kinds of layers only one kind's blocks are told."""
    blocks, index = EngineBlocks(SIZE, 100), PrefixIndex(100)
    blocks.take(Batch(sequence_number=1, events=[stored([7])]))
    blocks.take(Batch(sequence_number=2))
    blocks.take(Batch(sequence_number=2))
    blocks.take(Batch(sequence_number=3, events=[stored([8], 1, parent=7)]))
    assert matched(blocks, index) == 2


def test_after_a_gap_nothing_from_before_it_counts() -> None:
    blocks, index = EngineBlocks(SIZE, 100), PrefixIndex(100)
    blocks.take(Batch(sequence_number=1, events=[stored([7, 8, 9])]))
    assert matched(blocks, index) == 3
    blocks.take(Batch(sequence_number=3, events=[stored([7])]))
    assert matched(blocks, index) == 1


def test_reports_of_load_alone_and_other_ranks_make_no_gap() -> None:
    blocks, index = EngineBlocks(SIZE, 100), PrefixIndex(100)
    for batch in (
        Batch(sequence_number=0),
        Batch(sequence_number=7, events=[stored([7])]),
        Batch(sequence_number=7),
        Batch(sequence_number=1, dp_rank=1, events=[stored([8], 1, parent=7)]),
        Batch(sequence_number=8, events=[stored([9], 2, parent=8)]),
    ):
        blocks.take(batch)
    assert matched(blocks, index) == 3


def test_what_no_prompt_can_have_is_left_out() -> None:
    """After an unknown block, of an adapter or a salt, in the host's memory; and more than is remembered."""
    blocks, index = EngineBlocks(SIZE, 2), PrefixIndex(100)
    salted, adapted, keyed = stored([7]), stored([7]), stored([7])
    salted.stored.cache_salt, adapted.stored.lora_name = "of a tenant", "mine"
    keyed.stored.blocks[0].extra_keys.add()
    lies = [stored([8], 1, parent=5), salted, adapted, keyed, stored([7], lora_id=1), stored([7], cache_level=1)]
    blocks.take(Batch(sequence_number=1, events=lies))
    assert (matched(blocks, index), len(blocks)) == (0, 0)
    blocks.take(Batch(sequence_number=2, events=[stored([7, 8, 9])]))
    assert (matched(blocks, index), len(blocks)) == (2, 2)
    # It leaves the host's memory, not the device's.
    blocks.take(Batch(sequence_number=3, events=[removed(7, cache_level=1)]))
    assert matched(blocks, index) == 2
