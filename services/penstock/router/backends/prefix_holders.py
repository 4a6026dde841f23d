"""Memory of the backends that have prefixes: of many backends these are asked for a match, and few others."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Generic, TypeVar

HolderT = TypeVar("HolderT")
# Backends of one prefix: those that got it last.
_MOST_HOLDERS = 8
# Share of the blocks that backends tell: one in four is remembered, by its name. A prefix has several.
_TOLD_SHARE = 4


class PrefixHolders(Generic[HolderT]):
    """Holders of at most `capacity` prefixes, least recently used first.

    Of a prompt that was sent the prefixes of 1, 2, 4, 8 … blocks and the whole one are remembered, of what backends
    tell every fourth or so. A holder may have lost them.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        # Weak: a backend that is gone from its name is not kept.
        self._holders: OrderedDict[int, tuple[weakref.ref[HolderT], ...]] = OrderedDict()

    def of(self, hashes: Sequence[int]) -> list[HolderT]:
        """Return the holders of the longest remembered prefix of a prompt; empty when there is none."""
        known = self._holders
        for name in reversed(hashes):
            if name in known:
                return [holder for one in known[name] if (holder := one()) is not None]
        return []

    def add(self, hashes: Sequence[int], holder: HolderT) -> None:
        """Remember that a prompt was sent to `holder`."""
        self._put([hashes[at] for at in _places(len(hashes))], holder)

    def note(self, names: Sequence[int], holder: HolderT) -> None:
        """Remember blocks that `holder` told of."""
        self._put([name for name in names if not name % _TOLD_SHARE], holder)

    def _put(self, names: Sequence[int], holder: HolderT) -> None:
        # An object has one such reference.
        known, own = self._holders, weakref.ref(holder)
        for name in names:
            had = known.get(name)
            if had is None:
                known[name] = (own,)
                continue
            if had[-1] is not own:
                others = [one for one in had if one is not own and one() is not None]
                known[name] = (*others[-_MOST_HOLDERS + 1 :], own)
            known.move_to_end(name)
        while len(known) > self._capacity:
            known.popitem(last=False)


@lru_cache(maxsize=4096)
def _places(count: int) -> tuple[int, ...]:
    """Return the last places of the prefixes that are remembered of a prompt of `count` blocks, the whole first."""
    ends = {count, *(1 << power for power in range(count.bit_length()))} if count else ()
    return tuple(sorted((end - 1 for end in ends), reverse=True))
