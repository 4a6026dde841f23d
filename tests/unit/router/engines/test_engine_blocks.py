"""Cache events of another engine become the names that a router makes of prompts."""

from __future__ import annotations

from collections.abc import Sequence

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
    """After an unknown block, of another size, of an adapter, in the host's memory; and more than is remembered."""
    blocks, index = EngineBlocks(SIZE, 2), PrefixIndex(100)
    odd = stored([7])
    odd.stored.blocks[0].token_ids.append(1)
    lies = [stored([8], 1, parent=5), odd, stored([7], lora_id=1), stored([7], cache_level=1)]
    blocks.take(Batch(sequence_number=1, events=lies))
    assert (matched(blocks, index), len(blocks)) == (0, 0)
    blocks.take(Batch(sequence_number=2, events=[stored([7, 8, 9])]))
    assert (matched(blocks, index), len(blocks)) == (2, 2)
    # It leaves the host's memory, not the device's.
    blocks.take(Batch(sequence_number=3, events=[removed(7, cache_level=1)]))
    assert matched(blocks, index) == 2
