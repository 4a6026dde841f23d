"""The host pool: memory for blocks in addition to the device's pool, and the copies between the two.

On the CPU it is a second region of the same memory. A device with memory of its own gets pinned memory, so that it can
copy by itself. A block is one piece here, while in the device's pool each layer has a part of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.common.errors import StartupError
from penstock.generation.attention.fresh_memory import fresh_zeros
from penstock.generation.core.step import BlockCopy, CopyKind

if TYPE_CHECKING:
    from penstock.generation.attention.kv_cache import KVCachePool


class HostKVPool:
    """Blocks (blocks, layers, 2, block_size, kv_heads, head_dim) of a pool's dtype, the scales of int8, and index keys;
    zeroed.

    Unless memory is pinned, the operating system commits the pages when blocks are first written.
    """

    def __init__(self, kv: KVCachePool, num_blocks: int) -> None:
        """Allocate room for `num_blocks` blocks of `kv`. Raises StartupError naming --host-kv-memory."""
        self.num_blocks = num_blocks
        self.bytes_per_block = kv.bytes_per_block
        self._device_parts = kv.parts
        try:
            self._parts = [_like(part, num_blocks) for part in self._device_parts]
        except (RuntimeError, MemoryError, ValueError) as error:  # ValueError: more than numpy can count
            raise StartupError(
                f"cannot allocate a host pool of {num_blocks * kv.bytes_per_block} bytes ({num_blocks} blocks): "
                "lower --host-kv-memory",
                flag="--host-kv-memory",
            ) from error

    @property
    def num_bytes(self) -> int:
        """Size of the whole pool in bytes."""
        return self.num_blocks * self.bytes_per_block

    def take(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks of the device's pool to the host: (device's, host's), one after the other."""
        for device, host in pairs:
            for part, own in zip(self._device_parts, self._parts, strict=True):
                own[host].copy_(part[:, :, device])

    def give(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks to the device's pool: (host's, device's), one after the other."""
        for host, device in pairs:
            for part, own in zip(self._device_parts, self._parts, strict=True):
                part[:, :, device].copy_(own[host])

    def buffers(self, number: int) -> tuple[memoryview, ...]:
        """Memory of one block as bytes, `bytes_per_block` together."""
        return tuple(own[number].view(-1).view(torch.uint8).numpy().data for own in self._parts)

    def block(self, number: int) -> tuple[Tensor, ...]:
        """Views of one block: (layers, 2, block_size, kv_heads, head_dim), the scales of int8, and index keys."""
        return tuple(own[number] for own in self._parts)


def copy_blocks(kv: KVCachePool, host: HostKVPool | None, copies: Sequence[BlockCopy]) -> tuple[float, float]:
    """Carry out copies in order. Return the seconds of those to the host, and of those from it.

    Raises RuntimeError for a copy from or to the host without a host pool.
    """
    seconds = {CopyKind.OUT: 0.0, CopyKind.IN: 0.0}
    for kind, run in groupby(copies, attrgetter("kind")):
        pairs = [(copy.source, copy.destination) for copy in run]
        if kind is CopyKind.WITHIN:
            for independent in _independent(pairs):
                kv.copy_blocks(independent)
            continue
        if host is None:
            raise RuntimeError("a step copies blocks from or to the host, and this runner has no host pool")
        begun = time.perf_counter()
        (host.take if kind is CopyKind.OUT else host.give)(pairs)
        seconds[kind] += time.perf_counter() - begun
    return seconds[CopyKind.OUT], seconds[CopyKind.IN]


def _independent(pairs: list[tuple[int, int]]) -> Iterable[list[tuple[int, int]]]:
    """Yield runs of pairs. No pair reads or writes a block that an earlier pair of its run has written."""
    run: list[tuple[int, int]] = []
    written: set[int] = set()
    for source, destination in pairs:
        if source in written or destination in written:
            yield run
            run, written = [], set()
        run.append((source, destination))
        written.add(destination)
    yield run


def _like(part: Tensor, num_blocks: int) -> Tensor:
    """Return host memory for blocks of a part (layers, 2, blocks, ...) of the device's pool."""
    layers, both, _, *block = part.shape
    shape = (num_blocks, layers, both, *block)
    if part.device.type == "cpu":
        return fresh_zeros(shape, part.dtype)
    return torch.zeros(shape, dtype=part.dtype, pin_memory=True)
