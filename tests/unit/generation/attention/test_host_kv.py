"""The host pool's memory: copies to it and back, bit for bit, in the order in which they are told."""

from __future__ import annotations

import pytest
import torch
from factories.engine.pools import unwritten_pool
from penstock.common.errors import StartupError
from penstock.generation.attention.host_kv import HostKVPool, copy_blocks
from penstock.generation.attention.index_keys import IndexRows
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.step import BlockCopy, CopyKind

LAYERS, BLOCKS, SIZE, HEADS, DIM = 3, 8, 4, 2, 6
DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def pool(dtype: torch.dtype) -> KVCachePool:
    """A pool with index keys whose every block differs from all others."""
    index = IndexRows(2, 5, torch.bfloat16)
    kv = KVCachePool(LAYERS, BLOCKS, SIZE, HEADS, DIM, dtype, torch.device("cpu"), index=index)
    for layer in range(LAYERS):
        rows = torch.randn(BLOCKS * SIZE, HEADS, DIM).to(torch.float32 if dtype is torch.int8 else dtype)
        kv.write(layer, torch.arange(BLOCKS * SIZE), rows, -rows)
    for place in range(2):
        kv.write_index(place, torch.arange(BLOCKS * SIZE), torch.randn(BLOCKS * SIZE, 5).to(torch.bfloat16))
    return kv


def content(kv: KVCachePool, block: int) -> list[torch.Tensor]:
    return [part[:, :, block].clone() for part in kv.parts]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    kv = pool(dtype)
    host = HostKVPool(kv, 5)
    assert host.num_bytes == 5 * kv.bytes_per_block
    wanted, other = content(kv, 6), content(kv, 2)
    host.take([(6, 4), (2, 0)])
    assert same(list(host.block(4)), wanted)
    kv.clear()
    host.give([(4, 1), (0, 6)])
    assert same(content(kv, 1), wanted)
    assert same(content(kv, 6), other)
    assert not same(content(kv, 2), other), "other blocks stay as they are"


def test_copies_are_made_in_order() -> None:
    kv = pool(torch.float32)
    host = HostKVPool(kv, 2)
    blocks = [content(kv, number) for number in range(BLOCKS)]
    out_seconds, in_seconds = copy_blocks(
        kv,
        host,
        [
            BlockCopy(0, 1),
            # A block that is given away and filled anew, twice.
            BlockCopy(1, 0, CopyKind.OUT),
            BlockCopy(2, 1),
            BlockCopy(1, 3),
            BlockCopy(4, 1),
            BlockCopy(1, 1, CopyKind.OUT),
            BlockCopy(0, 1, CopyKind.IN),
            BlockCopy(1, 7, CopyKind.IN),
        ],
    )
    assert same(content(kv, 3), blocks[2])
    assert same(content(kv, 1), blocks[0])
    assert same(content(kv, 7), blocks[4])
    assert out_seconds > 0
    assert in_seconds > 0
    assert copy_blocks(kv, host, [BlockCopy(5, 6)]) == (0.0, 0.0)
    assert same(content(kv, 6), blocks[5])


def test_without_a_host_pool_a_copy_there_is_a_fault() -> None:
    with pytest.raises(RuntimeError, match="no host pool"):
        copy_blocks(pool(torch.float32), None, [BlockCopy(0, 0, CopyKind.OUT)])


def test_memory_that_cannot_be_had_names_the_flag() -> None:
    with pytest.raises(StartupError, match="--host-kv-memory") as caught:
        HostKVPool(unwritten_pool(LAYERS, BLOCKS, SIZE, HEADS, DIM, torch.float32), 2**50)
    assert caught.value.flag == "--host-kv-memory"
