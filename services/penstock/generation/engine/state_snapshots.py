"""Snapshots of the states that recurrent layers keep, at block boundaries, for the prefix cache. No tensors.

A block has keys and values but no state. So a sequence goes on after a cached prefix only if a snapshot has the state
after it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from penstock.generation.core.step import StateCopy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import ScheduledSequence
    from penstock.generation.engine.block_pool import BlockPool


class StateSnapshots:
    """Owner of `num_places` places for snapshots, found by the hash of the prefix before them.

    A snapshot is taken where a prompt's chunk ends with a block, and after the last whole block of a prompt: `end_of`
    makes chunks end there. That costs a further pass, and recurrent modules take as long for a few tokens as for a
    chunk of their own: so the snapshots of a sequence are at least `min_tokens` apart. A snapshot is dropped when its
    block is uncached, or as the least recently used one when there is no free place. Engine thread only.
    """

    def __init__(self, num_places: int, pool: BlockPool, min_tokens: int = 0) -> None:
        self._pool = pool
        self._min_tokens = min_tokens
        pool.on_forget.append(self._drop)
        # Least recently used first.
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_places - 1, -1, -1))
        # Of the current step: hash -> place, in `_places` once the step is done.
        self._coming: dict[bytes, int] = {}
        # Sequences that begin after a prefix, not handed out yet.
        self._restores: dict[int, tuple[Sequence, StateCopy]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def longest(self, hashes: list[bytes], most: int) -> int:
        """Return the largest number of leading blocks, at most `most`, after which there is a snapshot. O(most)."""
        return next((number for number in range(most, 0, -1) if hashes[number - 1] in self._places), 0)

    def end_of(self, sequence: Sequence, start: int, end: int) -> int:
        """Return the token, at most `end`, where a chunk of a prompt from `start` on should end for a snapshot."""
        if end - start <= 1:
            return end
        size = self._pool.block_size
        last = (sequence.num_tokens - 1) // size * size
        boundary = last if last <= end else end // size * size
        return boundary if boundary > start and self._saves_enough(sequence, start, boundary) else end

    def restore(self, sequence: Sequence) -> None:
        """Let a sequence begin with the snapshot after the whole blocks that were just found for it."""
        block_hash = sequence.block_hashes[sequence.num_computed_tokens // self._pool.block_size - 1]
        self._places.move_to_end(block_hash)
        copy = StateCopy(sequence.seq_id, self._places[block_hash], sequence.num_computed_tokens)
        self._restores[sequence.seq_id] = (sequence, copy)

    def restores(self) -> tuple[StateCopy, ...]:
        """Return copies to make before the step, and forget them."""
        made = tuple(copy for sequence, copy in self._restores.values() if sequence.block_table)
        self._restores.clear()
        return made

    def saves(self, entries: Iterable[ScheduledSequence]) -> tuple[StateCopy, ...]:
        """Return the snapshots to take after the step of these entries; their places are taken."""
        # Of a step that failed.
        self._free += self._coming.values()
        self._coming.clear()
        made = []
        for entry in entries:
            sequence, end = entry.sequence, entry.start + entry.num_tokens
            number, rest = divmod(end, self._pool.block_size)
            is_prompt = entry.num_tokens > 1 or end <= sequence.num_prompt_tokens
            # Drafts may be taken back: the state is before them.
            if rest or not is_prompt or number > len(sequence.block_hashes) or entry.verifiers:
                continue
            if not self._saves_enough(sequence, entry.start, end):
                continue
            block_hash = sequence.block_hashes[number - 1]
            if block_hash in self._places or block_hash in self._coming:
                continue
            if not self._free and not self._places:
                break
            place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
            self._coming[block_hash] = place
            made.append(StateCopy(sequence.seq_id, place, end))
        return tuple(made)

    def step_is_done(self) -> None:
        """Make the step's snapshots findable, after its blocks are."""
        for block_hash, place in self._coming.items():
            if self._pool.lookup(block_hash) is None:
                self._free.append(place)
            else:
                self._places[block_hash] = place
        self._coming.clear()

    def _saves_enough(self, sequence: Sequence, start: int, end: int) -> bool:
        """True when a snapshot after token `end` is `min_tokens` after the beginning and the last one up to `start`.

        O(min_tokens / block size).
        """
        before, size = end - self._min_tokens, self._pool.block_size
        near = sequence.block_hashes[before // size : start // size] if before >= 0 else ()
        return before >= 0 and not any(block_hash in self._places for block_hash in near)

    def _drop(self, block_hash: bytes) -> None:
        place = self._places.pop(block_hash, None)
        if place is not None:
            self._free.append(place)
