"""Estimate of each backend's prefix cache: approximate, bounded, never asked over the wire."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence


def routing_hashes(token_ids: Sequence[int], block_size: int, salt: str, max_blocks: int) -> list[int]:
    """Return chained hashes of the full blocks at the head of a prompt, at most `max_blocks`.

    Equal hashes mean equal salt and equal ids up to the end of that block (64-bit hashes of one process: a collision
    costs a cache miss, never a wrong answer).
    """
    data = array("I", token_ids[: max_blocks * block_size]).tobytes()
    return content_hashes(data, 4 * block_size, salt, max_blocks)


def content_hashes(data: bytes, width: int, salt: str, max_blocks: int) -> list[int]:
    """Return such hashes of anything that is `width` bytes a block."""
    chain = hash(salt)
    hashes = []
    for end in range(width, min(len(data), max_blocks * width) + 1, width):
        chain = hash((chain, data[end - width : end]))
        hashes.append(chain)
    return hashes


class PrefixIndex:
    """Block hashes sent to one backend, least recently used first, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._known: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def match(self, hashes: Sequence[int]) -> int:
        """Number of leading blocks that are known."""
        known = self._known
        for count, chain in enumerate(hashes):
            if chain not in known:
                return count
        return len(hashes)

    def add(self, hashes: Sequence[int]) -> None:
        """Remember blocks as most recently used: the head last, since other prompts share it."""
        known = self._known
        for chain in reversed(hashes):
            known[chain] = None
            known.move_to_end(chain)
        while len(known) > self._capacity:
            known.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the backend restarted."""
        self._known.clear()
