"""Third step of a start: pools for keys, values and states, sized by the memory that the weights leave."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.common.dtypes import dtype_name
from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.common.units import format_size
from penstock.generation.attention.cache_layout import CacheLayout, layout_of
from penstock.generation.attention.host_kv import HostKVPool
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.kv_shape import KVShape
from penstock.generation.attention.state_pool import StatePool, new_states, state_bytes
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.cache_group import CacheGroup
from penstock.generation.devices.base import Device
from penstock.generation.devices.graph_capture import GraphCapture
from penstock.generation.host.block_file_store import BlockFileStore
from penstock.generation.host.memory import kv_pool_blocks, parse_memory
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.transformers_states import StatefulModel
from penstock.generation.startup.batch_tuning import LARGEST_SIZE
from penstock.generation.startup.kv_disk import disk_line, open_kv_disk
from penstock.generation.startup.load_weights import LoadedWeights
from penstock.generation.startup.read_files import ModelFiles
from penstock.generation.startup.start import Start

_log = get_logger("penstock.generation")
# A disk that does not answer keeps no process from its end.
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Pools:
    """Memory that steps read and write."""

    # With the states of layers that keep one.
    kv: KVCachePool
    # Where blocks of preempted requests and evicted prefixes go; None: there is none.
    host: HostKVPool | None
    # Way to capture decode steps over these pools; None: they are not captured.
    graphs: GraphCapture | None
    # File of blocks behind the host pool; None: there is none.
    disk: BlockFileStore | None = None
    # Keys and values of named sequences where `kv` has groups; None: they have the further blocks of `kv`.
    named: KVCachePool | None = None

    def status_lines(self, context: int) -> list[str]:
        """Return lines of facts for people. `context`: longest sequence, in tokens."""
        kv = self.kv
        tokens, in_int8 = kv.num_slots, " in int8" if kv.dtype is torch.int8 else ""
        return [
            f"kv pool   {format_size(kv.num_bytes)}: {kv.num_blocks} blocks of {kv.block_size} = {tokens} tokens"
            f"{in_int8}, context {context}",
            *([] if kv.layout is None else _group_lines(kv)),
            *([] if kv.states is None else [_states_line(kv.states)]),
            *([] if self.disk is None else [disk_line(self.disk)]),
        ]

    def close(self) -> None:
        """Close the file of blocks. Nothing may run any more."""
        if self.disk is not None:
            self.disk.close(_CLOSE_SECONDS)


def make_pools(start: Start, files: ModelFiles, weights: LoadedWeights) -> Pools:
    """Make the pools, and those of the other ranks. Raises StartupError naming the flag of one that has no room."""
    config = start.config
    graphs = weights.device.graph_capture() if config.capture_steps else None
    layout = _layout(config, weights)
    if layout is not None:
        graphs = None
    kv = _kv_pool(config, weights.model, weights.device, files.context, layout, has_scrap=graphs is not None)
    host = _host_kv_pool(config, kv, weights.device, files.context)
    if weights.ranks is not None:
        num_host = 0 if host is None else host.num_blocks
        weights.ranks.make_pools(kv.num_blocks, kv.block_size, dtype_name(kv.dtype), num_host)
    named = None if layout is None else _named_pool(config, weights.model, kv)
    return Pools(kv, host, graphs, open_kv_disk(config, files, weights, kv, host), named)


def opens_graphs(config: GenerationServiceConfig, model: LanguageModel) -> bool:
    """True when callers may run the model's graphs: it has some where its layers are ours."""
    return config.is_model_open and isinstance(model, CausalLM) and model.config.has_graphs


def _layout(config: GenerationServiceConfig, weights: LoadedWeights) -> CacheLayout | None:
    """Return the places of layers that keep different positions; None: all layers share blocks.

    Other ranks and captured steps know one table of a sequence: there all layers keep whole contexts.
    """
    model = weights.model
    sights = model.sights
    if not config.kv_groups or len(set(sights)) < 2 or model.state_layout:
        return None
    if weights.ranks is not None:
        return None
    if config.capture_steps and weights.device.graph_capture() is not None:
        return None
    return layout_of(sights, model.config.kv_widths)


def _kv_pool(
    config: GenerationServiceConfig,
    model: LanguageModel,
    device: Device,
    context: int,
    layout: CacheLayout | None,
    *,
    has_scrap: bool,
) -> KVCachePool:
    size = device.block_size(config.block_size)
    shape = KVShape.of(
        model.config,
        model.dtype,
        size,
        requested=config.kv_cache_dtype,
        num_layers=None if layout is None else layout.layers_a_block,
        num_kv_heads=model.num_kv_heads,
    )
    left = device.memory()
    # A slot for each sequence that runs; warm-up needs two.
    slots, snapshots = max(2, config.max_running_sequences), _num_snapshots(config, model, context)
    states = (slots + snapshots) * state_bytes(model.state_layout)
    longest = _most_blocks(config, layout, context, size)
    blocks = kv_pool_blocks(
        parse_memory(config.kv_memory),
        # Of all processes that share this memory.
        bytes_per_block=shape.bytes_per_block * (config.tensor_parallel if device.ranks_share_memory else 1),
        blocks_of_context=longest,
        available=left.available - states,
        total=left.total,
        max_context_tokens=context,
        after=f"the weights and {format_size(states)} of states (--max-running-sequences, --state-snapshots)"
        if states
        else "the weights",
        # `auto` never takes more than every sequence at full length could use.
        max_blocks=config.max_running_sequences * longest,
    )
    kv = shape.pool(
        blocks,
        device.torch_device,
        num_further_blocks=_named_blocks(config, model, size) if layout is None else 0,
        has_scrap=has_scrap,
        layout=layout,
        begins_small=True,
    )
    kv.states = new_states(model.state_layout, slots, device.torch_device, snapshots)
    if kv.states is not None:
        _log.info(
            "layers keep a state of each sequence: equal beginnings are shared up to a snapshot, and preemption "
            "computes again what is behind it",
            states=kv.states.num_slots,
            snapshots=kv.states.num_snapshots,
            bytes_of_one=kv.states.bytes_per_slot,
        )
    return kv


def _named_blocks(config: GenerationServiceConfig, model: LanguageModel, size: int) -> int:
    """Return the number of blocks for named sequences."""
    return -(-config.graph_kv_tokens // size) if opens_graphs(config, model) else 0


def _named_pool(config: GenerationServiceConfig, model: LanguageModel, kv: KVCachePool) -> KVCachePool | None:
    """Return a pool in which named sequences have whole contexts in every layer; None: there are none."""
    blocks, facts = _named_blocks(config, model, kv.block_size), model.config
    if not blocks:
        return None
    return KVCachePool(
        facts.num_kv_layers, blocks, kv.block_size, model.num_kv_heads, facts.head_dim, kv.dtype, kv.device
    )


def _most_blocks(config: GenerationServiceConfig, layout: CacheLayout | None, context: int, size: int) -> int:
    """Return the most blocks that one sequence can hold."""
    if layout is None:
        return -(-context // size)
    # The step size is measured later.
    return layout.most_blocks(context, config.max_batch_tokens or LARGEST_SIZE, size)


def _num_snapshots(config: GenerationServiceConfig, model: LanguageModel, context: int) -> int:
    """Return the number of states to keep for the prefix cache.

    Modules that go on from a state by one token only would compute the end of every prompt so, to have one. No prompt
    of a short context has one.
    """
    if not config.prefix_cache or not model.state_layout or (isinstance(model, StatefulModel) and not model.continues):
        return 0
    return config.state_snapshots if context > config.state_snapshot_tokens else 0


def _host_kv_pool(config: GenerationServiceConfig, kv: KVCachePool, device: Device, context: int) -> HostKVPool | None:
    """Allocate the host pool; None: there is to be none. Raises StartupError naming --host-kv-memory."""
    flag = "--host-kv-memory"
    memory = parse_memory(config.host_kv_memory, flag=flag)
    if memory == 0 and config.kv_disk is not None:
        flag, memory = "--kv-disk-buffer", config.kv_disk_buffer
        if kv.states is not None:
            raise StartupError(
                "--kv-disk: layers of this model keep a state, which no block holds: leave it out", flag="--kv-disk"
            )
    if memory == 0:
        return None
    if kv.states is not None:
        raise StartupError(
            "--host-kv-memory: layers of this model keep a state, which no block holds: leave it out", flag=flag
        )
    left = device.host_memory()
    blocks = kv_pool_blocks(
        memory,
        bytes_per_block=kv.bytes_per_block * config.tensor_parallel,
        blocks_of_context=_most_blocks(config, kv.layout, context, kv.block_size),
        # The pool's pages are committed as they are written.
        available=left.available - (kv.num_bytes * config.tensor_parallel if kv.device.type == "cpu" else 0),
        total=left.total,
        max_context_tokens=context,
        flag=flag,
        after="the weights and the KV pool",
    )
    return HostKVPool(kv, blocks)


def _states_line(states: StatePool) -> str:
    """Return a line for people on the states."""
    snapshots = f"{states.num_snapshots} snapshots for the prefix cache" if states.num_snapshots else "no prefix cache"
    return f"states    {format_size(states.num_bytes)}: {states.num_slots} sequences, {snapshots}"


def _group_lines(kv: KVCachePool) -> list[str]:
    """Return a line for people on each group of layers."""
    assert kv.layout is not None
    return [
        f"          {len(layers)} layers that read {_sight_text(group)}: "
        f"{format_size(group.num_blocks * kv.bytes_per_block)} a block of {kv.block_size} tokens"
        for group, layers in zip(kv.layout.groups, kv.layout.members, strict=True)
    ]


def _sight_text(group: CacheGroup) -> str:
    if group.window:
        return f"{group.window} tokens back"
    return f"chunks of {group.chunk} tokens" if group.chunk else "everything"
