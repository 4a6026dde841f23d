"""Search for the farthest token of a sequence from which it can go on: every group of layers has what is read there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.generation.core.cache_group import CacheGroup
    from penstock.generation.engine.host_block import HostBlock


def find_read(
    groups: tuple[CacheGroup, ...],
    block_size: int,
    first: int,
    end: int,
    block_of: Callable[[int, int], int | HostBlock | None],
) -> tuple[list[int | HostBlock | None], ...]:
    """Return the blocks [first, n) of every group, n the greatest up to `end` such that the row after them may go on.

    `block_of` (index, number of the group) finds one. All lists are as long, and None stands for blocks that are not
    read from there on: those before the window or chunk of a group. Only the first group may read everything. A block
    is asked for once. O((end - first) x groups).
    """
    found: list[list[int | HostBlock | None]] = [[] for _ in groups]
    spans = [(number, group) for number, group in enumerate(groups) if group.span]
    if not groups[0].span:
        # Such a prefix ends where it has no block.
        for index in range(first, end):
            block = block_of(index, 0)
            if block is None:
                break
            found[0].append(block)
        end = first + len(found[0])
    known: dict[tuple[int, int], int | HostBlock | None] = {}
    place = 0
    # Go back from the end to where every other group has what is read from there on.
    while place < len(spans) and end > first:
        number, group = spans[place]
        begin = max(group.first_read(end * block_size) // block_size, first)
        lacking = None
        for index in range(end - 1, begin - 1, -1):
            if (index, number) not in known:
                known[index, number] = block_of(index, number)
            if known[index, number] is None:
                lacking = index
                break
        if lacking is None:
            found[number] = [*[None] * (begin - first), *(known[index, number] for index in range(begin, end))]
            place += 1
        else:
            end, place = lacking, 0
    return tuple(blocks[: max(end - first, 0)] if end > first else [] for blocks in found)
