"""Blocks that a sequence need not compute: cached ones, and those that another one fills in the same step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.engine.block_tables import BlockTables
    from penstock.generation.engine.group import SequenceGroup


class _Planned(NamedTuple):
    """A block that the step being put together fills; `key` is that of the group that does."""

    key: tuple[float, int]
    block: int


class SharedPrefixes:
    """Finds what sequences with equal beginnings compute once for all of them, within a step and over steps.

    A forward pass writes the keys and values of all its rows, layer by layer, before any of its rows attends, so a row
    may read what another row of the same step writes: a block counts as there once somebody is planned to fill it.

    Only blocks of groups that are served earlier are taken over: who is preempted is the last, so nobody's blocks are
    taken back from under a group that stays in the step.
    """

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._block_size = tables.pool.block_size
        # Of the step that is being put together, by hash: blocks that it fills, and whose key will fill the block
        # that a prompt's chunk ends before or in.
        self._planned: dict[bytes, _Planned] = {}
        self._coming: dict[bytes, tuple[float, int]] = {}

    def start_step(self) -> None:
        """Nothing is planned yet."""
        self._planned.clear()
        self._coming.clear()

    def find(self, group: SequenceGroup, sequence: Sequence) -> list[int]:
        """Blocks that hold the start of a sequence with nothing computed. Acquires nothing."""
        return self._find(group, sequence, 0)

    def take_over_blocks(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Take over what others have computed, or are planned to, of what `sequence` is to compute next."""
        # With drafts, some row before the last is drawn from.
        if sequence.num_draft_tokens:
            return
        first = sequence.num_computed_tokens // self._block_size
        found = self._find(group, sequence, first)
        if found:
            self._tables.take_over_blocks(sequence, first, found)

    def is_being_computed(self, group: SequenceGroup, sequence: Sequence, num_blocks: int) -> bool:
        """Whether an earlier group computes what `sequence` needs after its first `num_blocks` blocks in its next
        step: then it is better to wait. That group is in this step, so somebody always moves."""
        hashes = sequence.block_hashes
        if not self._coming or num_blocks >= min(len(hashes), self._limit(group, sequence)):
            return False
        key = self._coming.get(hashes[num_blocks])
        return key is not None and key <= group.key

    def plan(self, group: SequenceGroup, sequence: Sequence, end: int, *, is_cut: bool) -> None:
        """`sequence` will be computed up to token `end` in this step; `is_cut`: and further in the next one."""
        hashes, table = sequence.block_hashes, sequence.block_table
        filled = end // self._block_size
        for index in range(sequence.num_computed_tokens // self._block_size, min(filled, len(hashes))):
            known = self._planned.get(hashes[index])
            if known is None or group.key < known.key:
                self._planned[hashes[index]] = _Planned(group.key, table[index])
        if is_cut and filled < len(hashes):
            known_key = self._coming.get(hashes[filled], group.key)
            self._coming[hashes[filled]] = min(known_key, group.key)

    def forget_group(self, group: SequenceGroup) -> None:
        """`group` is preempted: what was planned for it will not be there."""
        self._planned = {key: planned for key, planned in self._planned.items() if planned.key != group.key}
        self._coming = {key: owner for key, owner in self._coming.items() if owner != group.key}

    def _find(self, group: SequenceGroup, sequence: Sequence, first: int) -> list[int]:
        """From block `first` on."""
        if not self._tables.prefix_cache:
            return []
        self._tables.hash_blocks(sequence, group.request.cache_salt)
        found: list[int] = []
        for block_hash in sequence.block_hashes[first : self._limit(group, sequence)]:
            block = self._tables.pool.lookup(block_hash)
            if block is None:
                planned = self._planned.get(block_hash)
                if planned is None or planned.key > group.key:
                    break
                block = planned.block
            found.append(block)
        return found

    def _limit(self, group: SequenceGroup, sequence: Sequence) -> int:
        """Blocks that need not be computed: something must be left to compute, and every row that somebody wants to
        see."""
        limit, needed = group.end(sequence) - 1, group.report.first_needed_row
        return max(limit if needed is None else min(limit, needed), 0) // self._block_size
