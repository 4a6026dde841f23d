"""Blocks that a sequence need not compute: cached ones, and those that another sequence fills in the same step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.generation.engine.block_tables import NOT_READ, FoundPrefix
from penstock.generation.engine.host_block import HostBlock
from penstock.generation.engine.prefix_search import find_read

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.generation.core.sequence import Sequence
    from penstock.generation.engine.block_tables import BlockTables
    from penstock.generation.engine.group import SequenceGroup
    from penstock.generation.engine.state_snapshots import StateSnapshots

    # Of a prefix's hash and the number of a group of layers.
    FindKept = Callable[[bytes, int], HostBlock | None]


class _Planned(NamedTuple):
    """A block that the step being put together fills; `key` and `tenant` are those of the group that fills it."""

    key: tuple[float, int]
    tenant: str
    # In each group of layers.
    blocks: tuple[int, ...]


class SharedPrefixes:
    """Finder of blocks that sequences with equal prefixes compute once for all, within a step and over steps.

    In every layer a forward pass writes the keys and values of all its rows before any row attends. So a row may read
    the keys of another row of the same step: a block counts as filled once a row of the step is planned to fill it.

    A group takes over blocks of the step itself only from earlier groups of its tenant. Preemption takes the last group
    of a tenant first, so it never frees blocks that another group in the step relies on.
    """

    def __init__(self, tables: BlockTables, snapshots: StateSnapshots | None = None) -> None:
        """`snapshots`: for a model with layers that keep states; a prefix then ends at a snapshot."""
        self._tables = tables
        self._snapshots = snapshots
        self._block_size = tables.pool.block_size
        # For the step being put together, by hash: the blocks that it fills, and the key of the group that will fill
        # the block before or in which a prompt's chunk ends.
        self._planned: dict[bytes, _Planned] = {}
        self._coming: dict[bytes, tuple[float, int]] = {}
        # Groups that take over blocks of this step: the blocks are still empty.
        self.borrowers: set[SequenceGroup] = set()

    def start_step(self) -> None:
        """Forget the plan of the last step."""
        self._planned.clear()
        self._coming.clear()
        self.borrowers.clear()

    def find(self, group: SequenceGroup, sequence: Sequence, find_kept: FindKept | None = None) -> FoundPrefix:
        """Return the blocks that hold the start of a sequence with nothing computed. Acquires none of them.

        `find_kept` finds a block that the pool has lost; None: in the host pool if there is one.
        """
        if find_kept is None and self._tables.host is not None:
            find_kept = self._tables.host.find
        if self._tables.spans:
            return self._find_read(group, sequence, 0, find_kept)
        found: list[int | HostBlock] = [*self._find(group, sequence, 0)]
        if self._snapshots is not None:
            return FoundPrefix((found[: self._snapshots.longest(sequence.block_hashes, len(found))],))
        if find_kept is None or not self._tables.prefix_cache:
            return FoundPrefix((found,))
        limit = self._limit(group, sequence)
        while len(found) < min(limit, len(sequence.block_hashes)):
            kept = find_kept(sequence.block_hashes[len(found)], 0)
            if kept is None:
                break
            found.append(kept)
            found += self._find(group, sequence, len(found))
        return FoundPrefix((found,))

    def take_over_blocks(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Take over blocks with the next tokens of `sequence` that others have computed or will in this step."""
        # With drafts, rows before the last one draw, too. A sequence with a state goes on from its own state.
        if sequence.num_draft_tokens or self._snapshots is not None:
            return
        first = sequence.num_computed_tokens // self._block_size
        if self._tables.spans:
            found = self._find_read(group, sequence, first, None)
        else:
            found = FoundPrefix(([*self._find(group, sequence, first)],))
        if len(found):
            self._tables.take_over_blocks(sequence, first, found)

    def is_being_computed(self, group: SequenceGroup, sequence: Sequence, num_blocks: int) -> bool:
        """True when an earlier group's next step computes the block after the first `num_blocks` of `sequence`.

        Then it is better to wait. That group is in this step, so some group always advances.
        """
        if self._snapshots is not None and sequence.block_table:
            # The sequence could not go on from there.
            return False
        hashes = sequence.block_hashes
        if not self._coming or num_blocks >= min(len(hashes), self._limit(group, sequence)):
            return False
        key = self._coming.get(hashes[num_blocks])
        return key is not None and key <= group.key

    def plan(self, group: SequenceGroup, sequence: Sequence, end: int, *, is_cut: bool) -> None:
        """Plan that `sequence` is computed up to token `end` in this step; `is_cut`: and further in the next one."""
        hashes, tables = sequence.block_hashes, sequence.tables
        filled, tenant = end // self._block_size, group.request.fair_share_key
        for index in range(sequence.num_computed_tokens // self._block_size, min(filled, len(hashes))):
            known = self._planned.get(hashes[index])
            if known is None or group.key < known.key:
                blocks = tuple([table.blocks[index] for table in tables])
                self._planned[hashes[index]] = _Planned(group.key, tenant, blocks)
        if is_cut and filled < len(hashes):
            known_key = self._coming.get(hashes[filled], group.key)
            self._coming[hashes[filled]] = min(known_key, group.key)

    def forget_group(self, group: SequenceGroup) -> None:
        """Forget the plans for `group`, which is preempted."""
        self._planned = {key: planned for key, planned in self._planned.items() if planned.key != group.key}
        self._coming = {key: owner for key, owner in self._coming.items() if owner != group.key}

    def _find(self, group: SequenceGroup, sequence: Sequence, first: int) -> list[int]:
        """Return the existing or planned blocks from block `first` on, without a gap."""
        if not self._tables.prefix_cache:
            return []
        self._tables.hash_blocks(sequence, group.block_salt)
        found: list[int] = []
        for block_hash in sequence.block_hashes[first : self._limit(group, sequence)]:
            block = self._block_of(group, block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _find_read(
        self, group: SequenceGroup, sequence: Sequence, first: int, find_kept: FindKept | None
    ) -> FoundPrefix:
        """Return blocks from block `first` on, before the farthest token with all the blocks that its row reads;
        NOT_READ stands for others. O(blocks of the prompt x groups)."""
        tables = self._tables
        if not tables.prefix_cache:
            return FoundPrefix(tuple([] for _ in tables.groups))
        tables.hash_blocks(sequence, group.block_salt)
        hashes = sequence.block_hashes
        end = min(self._limit(group, sequence), len(hashes))

        def block_of(index: int, number: int) -> int | HostBlock | None:
            block = self._block_of(group, hashes[index], number)
            if block is None and find_kept is not None:
                return find_kept(hashes[index], number)
            return block

        found = find_read(tables.groups, self._block_size, first, end, block_of)
        return FoundPrefix(tuple([NOT_READ if block is None else block for block in blocks] for blocks in found))

    def _block_of(self, group: SequenceGroup, block_hash: bytes, number: int = 0) -> int | None:
        """Return the block with a prefix for a group of layers: cached, or one that the step fills for `group`, too."""
        block = self._tables.pool.lookup(block_hash, number)
        if block is not None or self._snapshots is not None:
            # The state after a block of this step does not exist before the step's end.
            return block
        planned = self._planned.get(block_hash)
        if planned is None or planned.key > group.key or planned.tenant != group.request.fair_share_key:
            return None
        self.borrowers.add(group)
        return planned.blocks[number]

    def _limit(self, group: SequenceGroup, sequence: Sequence) -> int:
        """Most leading blocks that need not be computed: at least one token remains, and every row that is needed."""
        limit, needed = group.end(sequence) - 1, group.report.first_needed_row
        return max(limit if needed is None else min(limit, needed), 0) // self._block_size
