"""Prefixes that callers in this process hold: their blocks stay, whatever else the pool is asked for."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from penstock.generation.engine.block_pool import chain_hash, root_hash

if TYPE_CHECKING:
    from penstock.generation.engine.block_pool import BlockPool


class HeldPrefixes:
    """Holder of blocks of the pool that keep a prefix. Engine thread only."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._holders: Counter[int] = Counter()

    @property
    def holders(self) -> Counter[int]:
        """Number of handles that hold each block."""
        return self._holders

    def __len__(self) -> int:
        """Number of blocks that are held."""
        return len(self._holders)

    def find(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Return the blocks that keep the beginning of `token_ids`, as far as it is computed. O(blocks)."""
        size, found = self._pool.block_size, []
        parent = root_hash(salt)
        for index in range(len(token_ids) // size):
            parent = chain_hash(parent, array("I", token_ids[index * size : (index + 1) * size]).tobytes())
            block = self._pool.lookup(parent)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks, each once more."""
        for block in blocks:
            self._pool.acquire(block)
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back that one handle held, the last first, so that the deepest prefix goes first."""
        for block in reversed(blocks):
            self._pool.release(block)
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
