"""The store behind the host pool: prefixes that leave the KV pool go there, and come back before their prompt starts.

All copies go through the host pool. A prefix that the KV pool evicts is copied to the host pool, as it would be without
a store, and the store's thread writes it from there. Blocks for a waiting request are read into the host pool while
other requests compute. When they are there, the request finds them as it finds any prefix of the host pool.
"""

from __future__ import annotations

import itertools
import secrets
from typing import TYPE_CHECKING, NamedTuple

from penstock.generation.core.block_store import StoredBlock, key_of
from penstock.generation.engine.host_block import IN_STORE, HostBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Seq

    from penstock.generation.core.block_store import BlockStore, StoreEvent
    from penstock.generation.engine.block_pool import BlockPool
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.group import SequenceGroup
    from penstock.generation.engine.host_pool import HostPool
    from penstock.generation.engine.prefix_sharing import SharedPrefixes
    from penstock.generation.engine.stats import EngineStats

# The longest that the engine's thread sleeps for an order: it then looks at its commands.
_WAIT_SECONDS = 0.005
# A prefix's hash, and the number of a group of layers.
_Prefix = tuple[bytes, int]


class _Fetch(NamedTuple):
    """Order to read prefixes, each into a bundle of the host pool; `held` are further blocks of the same prompt."""

    prefixes: tuple[_Prefix, ...]
    blocks: tuple[int, ...]
    held: tuple[int, ...]


class DiskTier:
    """Engine's side of a BlockStore. Engine thread only."""

    def __init__(
        self, config: EngineConfig, host: HostPool, prefixes: SharedPrefixes, store: BlockStore, stats: EngineStats
    ) -> None:
        self._config = config
        self._host = host
        self._prefixes = prefixes
        self._store = store
        self._stats = stats
        self._fingerprint = store.fingerprint
        self._numbers = itertools.count()
        # Prefixes that the next step copies to the host pool, and what was ordered.
        self._kept: list[tuple[int, bytes]] = []
        self._saves: dict[int, tuple[int, ...]] = {}
        self._fetches: dict[int, _Fetch] = {}
        # Orders that bring a prefix, and those that a group waits for.
        self._coming: dict[_Prefix, int] = {}
        self._waiting: dict[SequenceGroup, set[int]] = {}
        # Orders with contents that were forgotten meanwhile.
        self._stale: set[int] = set()
        self._num_saving = 0
        # Some of the host pool must be left to be read into.
        self._most_saving = min(config.kv_disk_queue, max(config.num_host_blocks // 2, 1))
        host.on_keep = self._keep

    def keeps_waiting(self, group: SequenceGroup) -> bool:
        """True while blocks of a waiting group are being read. They are ordered when it is asked for the first time."""
        if group.is_store_asked:
            return group in self._waiting
        group.is_store_asked = True
        return not group.is_swapped and self._order(group)

    def take_events(self) -> None:
        """Take what the store has done: blocks that came are prefixes of the host pool."""
        for event in self._store.events():
            if event.number in self._saves:
                self._saved(event)
            else:
                self._fetched(event)

    def step_is_done(self) -> None:
        """Order to write the prefixes that this step has copied to the host pool."""
        if self._kept:
            self._save(self._kept)
            self._kept = []

    def wait(self) -> None:
        """Sleep until something was read or written, a moment at most. For a step without anything to compute."""
        self._store.wait(_WAIT_SECONDS)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Forget prefixes that cannot be trusted, in every group of layers, also those that are being read."""
        groups = range(len(self._config.block_groups))
        prefixes = [(block_hash, number) for block_hash in hashes for number in groups]
        self._stale.update(self._coming[prefix] for prefix in prefixes if prefix in self._coming)
        self._store.forget(key_of(self._fingerprint, *prefix, 0) for prefix in prefixes)

    def clear(self) -> None:
        """Forget every prefix, also those of other processes."""
        self._orders_are_stale()
        self._store.clear()

    def weights_changed(self) -> None:
        """Find nothing of earlier weights from now on, and let no other process find what these weights compute."""
        self._orders_are_stale()
        self._fingerprint = secrets.token_bytes(32)

    def save_all(self, pool: BlockPool, copy: Callable[[], None], is_time: Callable[[], bool]) -> int:
        """Write the prefixes of both pools that the store lacks, the last used first, while `is_time`. Return their
        number. Nothing else may use the pools meanwhile.

        `copy` carries out the copies that were decided. After new weights nothing is written: no process could find it.
        """
        if self._fingerprint != self._store.fingerprint:
            return 0
        self.step_is_done()
        self._drain(is_time)
        saved = 0
        for source, is_device in ((self._host.pool, False), (pool, True)):
            lacking = [
                (block, block_hash)
                for block, block_hash in source.cached_blocks()
                if not self._store.has(key_of(self._fingerprint, block_hash, source.group_of(block), 0))
            ]
            while lacking and is_time():
                batch: list[tuple[int, bytes]] = []
                # What the host pool evicts for one of these is written by now.
                while lacking and len(batch) < self._most_saving:
                    block, block_hash = lacking[0]
                    if is_device and self._host.pool.num_free < source.width(block):
                        break
                    del lacking[0]
                    if is_device:
                        batch.append((self._host.copy_out(block), block_hash))
                    elif source.hash_of(block) == block_hash:
                        self._host.lend(block)
                        batch.append((block, block_hash))
                if not batch:
                    break
                copy()
                self._num_saving += len(batch)
                saved += len(batch)
                self._save(batch)
                self._drain(is_time)
        return saved

    def _keep(self, block: int, block_hash: bytes) -> None:
        """Hold a prefix that is to be written, unless too many wait for it."""
        if self._num_saving >= self._most_saving:
            self._stats.disk_dropped_blocks += self._host.pool.width(block)
            return
        self._num_saving += 1
        self._host.lend(block)
        self._kept.append((block, block_hash))

    def _save(self, kept: Seq[tuple[int, bytes]]) -> None:
        number = next(self._numbers)
        self._saves[number] = tuple(block for block, _ in kept)
        pool = self._host.pool
        self._store.save(number, self._stored((block_hash, pool.group_of(block), block) for block, block_hash in kept))

    def _saved(self, event: StoreEvent) -> None:
        blocks = self._saves.pop(event.number)
        self._num_saving -= len(blocks)
        for block in blocks:
            self._host.take_back(block)

    def _orders_are_stale(self) -> None:
        """Give up prefixes that were to be written after this step, and let nobody find those of orders under way."""
        self._stale.update(self._fetches)
        self._host.forget_lent()
        for block, _ in self._kept:
            self._host.take_back(block)
        self._num_saving -= len(self._kept)
        self._kept = []

    def _find(self, block_hash: bytes, group: int) -> HostBlock | None:
        """Return the block of a prefix in the host pool or in the store."""
        found = self._host.find(block_hash, group)
        if found is None and (
            (block_hash, group) in self._coming or self._store.has(key_of(self._fingerprint, block_hash, group, 0))
        ):
            return HostBlock(IN_STORE, block_hash)
        return found

    def _order(self, group: SequenceGroup) -> bool:
        """Order the blocks of a group's prompts that only the store has. False: there are none, or no room for them."""
        wanted: dict[_Prefix, None] = {}
        held: list[int] = []
        for leader in group.leaders:
            for number, blocks in enumerate(self._prefixes.find(group, leader, self._find).groups):
                for found in blocks:
                    if isinstance(found, HostBlock):
                        if found.block == IN_STORE:
                            wanted[found.block_hash, number] = None
                        else:
                            held.append(found.block)
        if not wanted:
            return False
        numbers = {self._coming[prefix] for prefix in wanted if prefix in self._coming}
        mine = [prefix for prefix in wanted if prefix not in self._coming]
        # Room for some of these blocks must not be made by evicting others.
        for block in held:
            self._host.lend(block)
        mine = self._fitting(mine)
        if mine:
            numbers.add(self._fetch(mine, held))
        else:
            for block in held:
                self._host.take_back(block)
        if numbers:
            self._waiting[group] = numbers
        return bool(numbers)

    def _fitting(self, prefixes: list[_Prefix]) -> list[_Prefix]:
        """Return the prefixes that the host pool has room for: the first ones; of several groups of layers all or
        none."""
        groups, room = self._config.block_groups, self._host.pool.num_free
        for place, (_, number) in enumerate(prefixes):
            room -= groups[number].num_blocks
            if room < 0:
                return [] if len(groups) > 1 or groups[0].span else prefixes[:place]
        return prefixes

    def _fetch(self, prefixes: list[_Prefix], held: list[int]) -> int:
        number = next(self._numbers)
        blocks = tuple(self._host.lend_empty(group) for _, group in prefixes)
        self._fetches[number] = _Fetch(tuple(prefixes), blocks, tuple(held))
        self._coming.update(dict.fromkeys(prefixes, number))
        self._store.fetch(
            number,
            self._stored(
                (block_hash, group, block) for (block_hash, group), block in zip(prefixes, blocks, strict=True)
            ),
        )
        return number

    def _fetched(self, event: StoreEvent) -> None:
        fetch, pool = self._fetches.pop(event.number), self._host.pool
        is_stale = event.number in self._stale
        self._stale.discard(event.number)
        done = iter(event.done)
        for prefix, block in zip(fetch.prefixes, fetch.blocks, strict=True):
            self._coming.pop(prefix, None)
            block_hash, group = prefix
            # All blocks of the bundle.
            came = [next(done) for _ in range(pool.width(block))]
            if all(came) and not is_stale:
                pool.register(block, block_hash)
                if group == 0:
                    self._stats.disk_hit_tokens += self._config.block_size
        # The deepest block of a prompt is evicted first.
        for block in (*reversed(fetch.blocks), *reversed(fetch.held)):
            self._host.take_back(block)
        for group_waiting, numbers in list(self._waiting.items()):
            numbers.discard(event.number)
            if not numbers:
                del self._waiting[group_waiting]

    def _stored(self, bundles: Iterable[tuple[bytes, int, int]]) -> tuple[StoredBlock, ...]:
        """Return the keys and blocks of bundles: (hash, group of layers, bundle)."""
        return tuple(
            StoredBlock(key_of(self._fingerprint, block_hash, group, place), block)
            for block_hash, group, bundle in bundles
            for place, block in enumerate(self._host.pool.bundle(bundle))
        )

    def _drain(self, is_time: Callable[[], bool]) -> None:
        """Wait until all that was ordered is written or read."""
        while (self._saves or self._fetches) and is_time():
            self.wait()
            self.take_events()
