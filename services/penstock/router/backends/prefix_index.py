"""Cached prefixes of one backend as a router knows them: what it told, and until then what was sent there. Bounded."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, partial

from penstock.common.block_hashes import chain_hash, root_hash, short_name


def routing_hashes(token_ids: Sequence[int], block_size: int, salt: str, max_blocks: int) -> list[int]:
    """Return the names of the full blocks at the head of a prompt, at most `max_blocks`, as its backend tells them.

    Equal names mean equal salt and equal ids up to the end of that block (64 bits: a collision costs a cache miss,
    never a wrong answer).
    """
    data = array("I", token_ids[: max_blocks * block_size]).tobytes()
    return content_hashes(data, 4 * block_size, salt, max_blocks)


def content_hashes(data: bytes, width: int, salt: str, max_blocks: int) -> list[int]:
    """Return such names of anything that is `width` bytes a block."""
    chain = root_hash(salt)
    names = []
    for end in range(width, min(len(data), max_blocks * width) + 1, width):
        chain = chain_hash(chain, data[end - width : end])
        names.append(short_name(chain))
    return names


class BlockNames(list[int]):
    """Names of the blocks at the head of a prompt, salted.

    `plain`: the same without a salt, made when they are first asked for: for an engine that shares its blocks among all
    callers.
    """

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: str, max_blocks: int) -> None:
        super().__init__(routing_hashes(token_ids, block_size, salt, max_blocks))
        self._make_plain = partial(routing_hashes, token_ids, block_size, "", max_blocks)

    @cached_property
    def plain(self) -> list[int]:
        """Names without a salt."""
        return self._make_plain()


class PrefixIndex:
    """Names of the blocks that one backend probably has cached.

    Those that it told are believed, at most `most_told`. Others were sent there, and may be computed or not, or
    forgotten again: at most `capacity`, the least recently used go first. A backend that tells nothing is known by
    these alone.
    """

    def __init__(self, capacity: int, most_told: int | None = None) -> None:
        """`most_told` None: as `capacity`."""
        self._capacity = max(1, capacity)
        self._most_told = self._capacity if most_told is None else most_told
        self._told: set[int] = set()
        self._sent: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._told) + len(self._sent)

    def match(self, hashes: Sequence[int]) -> int:
        """Number of leading blocks that are known."""
        told, sent = self._told, self._sent
        for name in hashes:
            if name not in told and name not in sent:
                # Without a count in the loop: every choice of a backend asks this of many.
                return hashes.index(name)
        return len(hashes)

    def add(self, hashes: Sequence[int]) -> None:
        """Remember blocks that are sent as most recently used: the head last, since other prompts share it."""
        told, sent = self._told, self._sent
        for name in reversed(hashes):
            if name not in told:
                sent[name] = None
                sent.move_to_end(name)
        while len(sent) > self._capacity:
            sent.popitem(last=False)

    def take(self, kept: Sequence[int], gone: Sequence[int], *, begins_anew: bool) -> None:
        """Take what the backend tells. `begins_anew`: nothing that it told before counts."""
        told, sent = self._told, self._sent
        if begins_anew:
            told.clear()
        told.difference_update(gone)
        # Of a pool with more blocks than are remembered the rest is as if it were not told: what was sent is known.
        taken = kept[: max(self._most_told - len(told), 0)]
        told.update(taken)
        if sent:
            for names in (taken, gone):
                for name in names:
                    sent.pop(name, None)

    def clear(self) -> None:
        """Forget everything: the backend restarted."""
        self._told.clear()
        self._sent.clear()
