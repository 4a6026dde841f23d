"""Pool of keys and values of what drafts: a draft model's or a draft head's, within --assistant-kv-memory."""

from __future__ import annotations

from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.kv_shape import KVShape
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.base import Device
from penstock.generation.host.memory import kv_pool_blocks, parse_memory

MEMORY_FLAG = "--assistant-kv-memory"


def make_draft_pool(
    config: GenerationServiceConfig, shape: KVShape, device: Device, *, context: int, most_blocks: int
) -> KVCachePool:
    """Make the pool. `context`: most tokens of a sequence. `most_blocks`: blocks of a pool with room for as many tokens
    as the served model's, which `auto` never exceeds. Raises StartupError naming --assistant-kv-memory."""
    left = device.memory()
    blocks = kv_pool_blocks(
        parse_memory(config.assistant_kv_memory, flag=MEMORY_FLAG),
        bytes_per_block=shape.bytes_per_block,
        blocks_of_context=-(-context // shape.block_size),
        available=left.available,
        total=left.total,
        flag=MEMORY_FLAG,
        max_context_tokens=context,
        max_blocks=max(most_blocks, 1),
    )
    return shape.pool(blocks, device.torch_device, begins_small=True)
