"""Memory of the backends that prefixes were sent to: of many backends only these are asked for a match."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

HolderT = TypeVar("HolderT")
# Backends of one prefix: those that got it last.
_MOST_HOLDERS = 8


class PrefixHolders(Generic[HolderT]):
    """Holders of at most `capacity` prefixes, least recently used first.

    Of a prompt the prefixes of 1, 2, 4, 8 … blocks and the whole one are remembered. A holder may have lost them.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        # Weak: a backend that is gone from its name is not kept.
        self._holders: OrderedDict[int, tuple[weakref.ref[HolderT], ...]] = OrderedDict()

    def of(self, hashes: Sequence[int]) -> list[HolderT]:
        """Return the holders of the longest remembered prefix of a prompt; empty when there is none."""
        known = self._holders
        found = next((known[one] for one in reversed(hashes) if one in known), ())
        return [holder for one in found if (holder := one()) is not None]

    def add(self, hashes: Sequence[int], holder: HolderT) -> None:
        """Remember that a prompt was sent to `holder`."""
        known, length = self._holders, 1
        ends = {len(hashes)} if hashes else set()
        while length < len(hashes):
            ends.add(length)
            length *= 2
        for end in ends:
            others = [one for one in known.get(hashes[end - 1], ()) if one() not in (None, holder)]
            known[hashes[end - 1]] = (*others[-_MOST_HOLDERS + 1 :], weakref.ref(holder))
            known.move_to_end(hashes[end - 1])
        while len(known) > self._capacity:
            known.popitem(last=False)
