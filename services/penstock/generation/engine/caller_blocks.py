"""Blocks of the pools that callers hold themselves: claimed by number, or kept as a prefix for later prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.common.errors import FailedPrecondition
from penstock.generation.engine.acceptance import shareable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sized

    from penstock.generation.core.request import Request
    from penstock.generation.engine.config import EngineConfig
    from penstock.generation.engine.engine_listener import Listeners
    from penstock.generation.engine.scheduler import Scheduler


class CallerBlocks:
    """Blocks of one engine's pools that belong to no request. Engine thread only, except `room_of`."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        outputs: Sized,
        listeners: Listeners,
    ) -> None:
        """`outputs` are those that the caller has not taken yet."""
        self._config = config
        # The same configuration with the number of blocks that requests can have.
        self._room = config
        self._scheduler = scheduler
        self._outputs = outputs
        self._listeners = listeners

    def room_of(self, request: Request, weights_version: int) -> EngineConfig:
        """Return the configuration with the number of blocks that a request may have which begins on this version of
        the weights. Thread-safe."""
        room = self._room
        if room is self._config:
            return room
        # Held blocks are not room for other requests, but a request that begins with their prefix uses them.
        shared = self._scheduler.held_prefixes.num_shared(*shareable(room, request, weights_version))
        return replace(room, num_blocks=room.num_blocks + shared) if shared else room

    @property
    def are_any(self) -> bool:
        """True while callers hold blocks of the device."""
        return self._room is not self._config

    @property
    def device(self) -> frozenset[int]:
        """Blocks of the device that were claimed."""
        return self._scheduler.claims.blocks

    @property
    def host(self) -> frozenset[int]:
        """Blocks of the host pool that were claimed."""
        return frozenset() if self._scheduler.host is None else self._scheduler.host.claims.blocks

    def claim(self, blocks: Iterable[int], field: str = "blocks", *, host_blocks: Iterable[int] = ()) -> None:
        """Hold blocks of the pool, and of the host pool, for the caller, by their numbers, until `release`.

        All or none; claimed ones stay claimed. Raises InvalidArgument naming `field` for numbers that a pool does not
        have, and FailedPrecondition: BUSY for new ones of the device while requests are live, BLOCK_IN_USE.
        """
        claims, host = self._scheduler.claims, self._scheduler.host
        missing = claims.missing(blocks, field)
        missing_on_host = set() if host is None else host.claims.missing(host_blocks, field)
        if missing and self._has_work:
            raise FailedPrecondition("requests are live: claim blocks while there are none", reason="BUSY")
        if missing and len(claims) + len(missing) + len(self._scheduler.held_prefixes) >= self._config.num_blocks:
            raise _last_block()
        if host is not None:
            if self._scheduler.disk is not None:
                # No step may follow that takes back what the store is done with.
                self._scheduler.disk.take_events()
            host.claims.check(missing_on_host)
        claims.claim(missing)
        if host is not None:
            host.claims.claim(missing_on_host)
        if missing or missing_on_host:
            self._changed()

    def release(self, blocks: Iterable[int] | None = None, host_blocks: Iterable[int] | None = None) -> int:
        """Release claimed blocks; without arguments all of both pools. Others are ignored. Return the number of
        released ones."""
        is_all = blocks is None and host_blocks is None
        released = self._scheduler.claims.release(None if is_all else blocks or ())
        if self._scheduler.host is not None:
            released += self._scheduler.host.claims.release(None if is_all else host_blocks or ())
        self._changed()
        return released

    def hold_prefix(self, token_ids: list[int], salt: str) -> tuple[list[int], int]:
        """Hold the blocks of the computed prefix of `token_ids` until `release_prefix`. Return them, and the number of
        its tokens.

        Raises FailedPrecondition: BUSY while requests are live, NO_PREFIX_CACHE, and if no block would be left.
        """
        if not self._config.prefix_cache:
            raise FailedPrecondition("the prefix cache is off: start with --prefix-cache", reason="NO_PREFIX_CACHE")
        if self._has_work:
            raise FailedPrecondition("requests are live: hold a prefix while there are none", reason="BUSY")
        held = self._scheduler.held_prefixes
        found, num_tokens = held.find(token_ids, salt)
        blocks = sum(map(self._scheduler.pool.width, {*found, *held.holders}))
        if blocks + len(self._scheduler.claims) >= self._config.num_blocks:
            raise _last_block()
        held.hold(found)
        self._changed()
        return found, num_tokens

    def release_prefix(self, blocks: list[int]) -> None:
        """Release the blocks that `hold_prefix` returned."""
        self._scheduler.held_prefixes.release(blocks)
        self._changed()

    @property
    def _has_work(self) -> bool:
        return self._scheduler.has_work or len(self._outputs) > 0

    def _changed(self) -> None:
        """Check requests against the remaining blocks from now on."""
        taken = len(self._scheduler.claims) + len(self._scheduler.held_prefixes)
        config = self._config
        self._room = replace(config, num_blocks=config.num_blocks - taken) if taken else config
        for hear in self._listeners.claimed:
            hear(self.device, self.host)


def _last_block() -> FailedPrecondition:
    return FailedPrecondition("at least one block must remain for requests", reason="BLOCK_IN_USE")
