"""Copies of blocks that the next step begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.generation.core.step import BlockCopy, CopyKind

if TYPE_CHECKING:
    from penstock.generation.engine.group import SequenceGroup


class BlockCopies:
    """List of copies in the order in which they were decided, which is the order in which they are carried out.

    A block may be given back, given away and filled anew while a step is put together. In order every copy reads what
    its source held when it was decided, so none of that needs more care. They outlive a step that came out empty.
    """

    def __init__(self) -> None:
        # Each with the group that it is a copy-on-write of.
        self._copies: list[tuple[SequenceGroup | None, BlockCopy]] = []

    def within(self, group: SequenceGroup, source: int, destination: int) -> None:
        """Copy a block that `group` writes into and others hold as well."""
        self._copies.append((group, BlockCopy(source, destination)))

    def add(self, source: int, destination: int, kind: CopyKind) -> None:
        """Copy a block from or to the host pool."""
        self._copies.append((None, BlockCopy(source, destination, kind)))

    def forget_group(self, group: SequenceGroup) -> None:
        """Take out the copies that only rows of `group` needed, which are not computed."""
        self._copies = [(other, copy) for other, copy in self._copies if other is not group]

    def listed(self) -> tuple[BlockCopy, ...]:
        """Return the copies, in order."""
        return tuple([copy for _, copy in self._copies]) if self._copies else ()

    def clear(self) -> None:
        """Forget all: a step carries them out."""
        self._copies.clear()
