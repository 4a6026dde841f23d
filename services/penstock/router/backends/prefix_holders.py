"""Memory of the backends that have prefixes: of many backends only these are asked for a match."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
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
        found = next((known[one] for one in reversed(hashes) if one in known), ())
        return [holder for one in found if (holder := one()) is not None]

    def add(self, hashes: Sequence[int], holder: HolderT) -> None:
        """Remember that a prompt was sent to `holder`."""
        length = 1
        ends = {len(hashes)} if hashes else set()
        while length < len(hashes):
            ends.add(length)
            length *= 2
        self._put([hashes[end - 1] for end in ends], holder)

    def note(self, names: Sequence[int], holder: HolderT) -> None:
        """Remember blocks that `holder` told of."""
        self._put([name for name in names if not name % _TOLD_SHARE], holder)

    def _put(self, names: Sequence[int], holder: HolderT) -> None:
        # An object has one such reference.
        known, own = self._holders, weakref.ref(holder)
        for name in names:
            had = known.get(name, ())
            if not had or had[-1] is not own:
                others = [one for one in had if one is not own and one() is not None]
                known[name] = (*others[-_MOST_HOLDERS + 1 :], own)
            known.move_to_end(name)
        while len(known) > self._capacity:
            known.popitem(last=False)
