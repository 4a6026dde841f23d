"""KV pools that show reads of unwritten places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from penstock.generation.attention.cache_layout import CacheLayout, layout_of
from penstock.generation.attention.host_kv import HostKVPool
from penstock.generation.attention.index_keys import IndexRows
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.state_pool import new_states
from penstock.generation.core.layer_shapes import LayerShape
from penstock.generation.engine.config import EngineConfig
from penstock.generation.models.language_model import LanguageModel

# Few: some are taken by others while the tests run.
NUM_SNAPSHOTS = 4


def unwritten_pool(
    layers: int,
    blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    layout: CacheLayout | None = None,
    *,
    has_values: bool = True,
    index: IndexRows | None = None,
    shapes: Sequence[LayerShape] = (),
) -> KVCachePool:
    """Make a pool on the CPU that gives NaN where nothing was written."""
    cpu, sizes = torch.device("cpu"), (layers, blocks, block_size, kv_heads, head_dim)
    kinds: dict[str, Any] = {"has_values": has_values, "index": index, "shapes": shapes}
    kv = KVCachePool(*sizes, dtype, cpu, has_scrap=True, layout=layout, **kinds)
    spoil(kv)
    return kv


def in_groups(model: LanguageModel, config: EngineConfig) -> tuple[CacheLayout | None, EngineConfig]:
    """Return the layout of a model with layers of several sights, as a start does, and the configuration with as many
    bundles as it had blocks; None: one block holds all layers."""
    if model.state_layout or len(set(model.sights)) < 2:
        return None, config
    layout = layout_of(model.sights, model.config.kv_widths)
    times = layout.bundle_blocks
    blocks, host = config.num_blocks * times, config.num_host_blocks * times
    return layout, replace(config, groups=layout.groups, num_blocks=blocks, num_host_blocks=host)


def add_states(model: LanguageModel, kv: KVCachePool, config: EngineConfig) -> EngineConfig:
    """Give the pool the states that the model's layers keep, if they do. Return the configuration that goes with it."""
    snapshots = NUM_SNAPSHOTS if config.prefix_cache else 0
    kv.states = new_states(model.state_layout, config.max_running_sequences, kv.device, snapshots)
    return config if kv.states is None else replace(config, keeps_states=True, num_state_snapshots=snapshots)


def unwritten_host_pool(kv: KVCachePool, config: EngineConfig) -> HostKVPool | None:
    """Make the host pool of the configuration, which gives NaN where nothing was written; None where it has none."""
    if not config.num_host_blocks:
        return None
    host = HostKVPool(kv, config.num_host_blocks)
    for number in range(config.num_host_blocks):
        for part in host.block(number):
            # Of int8 the scales alone.
            if part.is_floating_point():
                part.fill_(torch.nan)
    return host


def spoil(kv: KVCachePool) -> None:
    """Make every place of the pool NaN: of int8 the scales alone."""
    for part in kv.tensors:
        if part is not None and part.is_floating_point():
            part.fill_(torch.nan)
    for place in range(0 if kv.index is None else kv.index.num_layers):
        kv.index_key(place).fill_(torch.nan)
