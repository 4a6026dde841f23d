"""Copies of blocks at the beginning of the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.generation.core.step import BlockCopy, CopyKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.generation.engine.group import SequenceGroup


def num_swapped(copies: Iterable[BlockCopy]) -> tuple[int, int]:
    """Return the numbers of blocks that are copied to the host pool and from it."""
    kinds = [copy.kind for copy in copies]
    return kinds.count(CopyKind.OUT), kinds.count(CopyKind.IN)


class BlockCopies:
    """List of copies in the order of their decision. They are carried out in the same order.

    A block may be freed, reallocated and filled anew while a step is put together. The order guarantees that every copy
    reads the content that its source had at the decision. The copies outlive a step that came out empty.
    """

    def __init__(self) -> None:
        # Each with the group that it is a copy-on-write of.
        self._copies: list[tuple[SequenceGroup | None, BlockCopy]] = []

    def within(self, group: SequenceGroup, source: int, destination: int) -> None:
        """Copy a shared block that `group` writes into."""
        self._copies.append((group, BlockCopy(source, destination)))

    def add(self, source: int, destination: int, kind: CopyKind) -> None:
        """Copy a block from or to the host pool."""
        self._copies.append((None, BlockCopy(source, destination, kind)))

    def forget_group(self, group: SequenceGroup) -> None:
        """Remove the copies for rows of `group`: these are not computed."""
        self._copies = [(other, copy) for other, copy in self._copies if other is not group]

    def listed(self) -> tuple[BlockCopy, ...]:
        """Return the copies, in order."""
        return tuple([copy for _, copy in self._copies]) if self._copies else ()

    def clear(self) -> None:
        """Forget all: a step carries them out."""
        self._copies.clear()
