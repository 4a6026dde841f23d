"""Places of layers in blocks: equal sights share blocks, and few places have no layer."""

from __future__ import annotations

import pytest
from penstock.generation.attention.cache_layout import LayerSight, layers_a_block, layout_of
from penstock.generation.core.cache_group import CacheGroup

FULL, WINDOW, CHUNK = LayerSight(), LayerSight(512, align=64), LayerSight(chunk=8192)


def test_layers_of_one_sight_share_every_block() -> None:
    layout = layout_of([WINDOW] * 5)
    assert layout.groups == (CacheGroup(1, window=512, align=64),)
    assert layout.places == tuple((0, place) for place in range(5))


def test_the_group_that_reads_everything_is_first_and_no_two_layers_share_a_place() -> None:
    layout = layout_of([WINDOW, WINDOW, CHUNK, FULL] * 3)
    assert [group.num_blocks for group in layout.groups] == [1, 1, 2]
    assert [bool(group.span) for group in layout.groups] == [False, True, True]
    assert layout.groups[1].chunk == 8192
    assert layout.layers_a_block == 3
    assert len(set(layout.places)) == 12
    assert {block for block, _ in layout.places} == set(range(layout.bundle_blocks))
    assert [layout.places[layer][0] for layer in (3, 7, 11)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("sizes", "each"),
    [((13, 13), 13), ((3, 15), 3), ((4, 22), 2), ((5, 29), 5), ((10, 52), 2), ((8, 24), 8), ((7,), 7)],
)
def test_a_block_has_as_many_layers_as_waste_few_places(sizes: tuple[int, ...], each: int) -> None:
    assert layers_a_block(sizes) == each
    assert all(-(-size // each) * each <= 1.035 * size for size in sizes)


def test_a_sequence_holds_whole_contexts_only_where_they_are_read() -> None:
    layout = layout_of([FULL] + [LayerSight(30)] * 2)
    assert (layout.layers_a_block, layout.bundle_blocks) == (1, 3)
    # 1000 tokens are 100 blocks; 30 positions and 5 rows are in at most 5.
    assert layout.most_blocks(1000, rows=5, block_size=10) == 100 + 2 * 5
    assert layout.most_blocks(20, rows=5, block_size=10) == 3 * 2


def test_a_row_reads_from_its_window_or_chunk_on() -> None:
    assert [CacheGroup(window=3).first_read(position) for position in (-1, 0, 2, 3, 9)] == [0, 0, 0, 1, 7]
    assert [CacheGroup(window=3, align=4).first_read(position) for position in (5, 6, 9, 10)] == [0, 4, 4, 8]
    assert [CacheGroup(chunk=4).first_read(position) for position in (-1, 3, 4, 11)] == [0, 0, 4, 8]
    assert CacheGroup().first_read(99) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
        ({"window": -1}, "must not be negative"),
        ({"align": 0}, "align must be at least 1"),
        ({"window": 3, "chunk": 3}, "not both"),
    ],
)
def test_wrong_groups_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheGroup(**fields)
