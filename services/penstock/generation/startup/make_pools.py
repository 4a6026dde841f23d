"""Third step of a start: pools for keys, values and states, sized by the memory that the weights leave."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.common.dtypes import dtype_name
from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.common.units import format_size
from penstock.generation.attention.host_kv import HostKVPool
from penstock.generation.attention.kv_cache import KVCachePool, kv_bytes_per_block, kv_cache_dtype
from penstock.generation.attention.state_pool import StatePool, new_states, state_bytes
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.base import Device
from penstock.generation.devices.graph_capture import GraphCapture
from penstock.generation.host.memory import kv_pool_blocks, parse_memory
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.transformers_states import StatefulModel
from penstock.generation.startup.load_weights import LoadedWeights
from penstock.generation.startup.read_files import ModelFiles
from penstock.generation.startup.start import Start

_log = get_logger("penstock.generation")


@dataclass(frozen=True, slots=True)
class Pools:
    """Memory that steps read and write."""

    # With the states of layers that keep one.
    kv: KVCachePool
    # Where blocks of preempted requests and evicted prefixes go; None: there is none.
    host: HostKVPool | None
    # Way to capture decode steps over these pools; None: they are not captured.
    graphs: GraphCapture | None

    def status_lines(self, context: int) -> list[str]:
        """Return lines of facts for people. `context`: longest sequence, in tokens."""
        kv = self.kv
        tokens, in_int8 = kv.num_blocks * kv.block_size, " in int8" if kv.dtype is torch.int8 else ""
        return [
            f"kv pool   {format_size(kv.num_bytes)}: {kv.num_blocks} blocks of {kv.block_size} = {tokens} tokens"
            f"{in_int8}, context {context}",
            *([] if kv.states is None else [_states_line(kv.states)]),
        ]


def make_pools(start: Start, files: ModelFiles, weights: LoadedWeights) -> Pools:
    """Make the pools, and those of the other ranks. Raises StartupError naming the flag of one that has no room."""
    config = start.config
    graphs = weights.device.graph_capture() if config.capture_steps else None
    kv = _kv_pool(config, weights.model, weights.device, files.context, has_scrap=graphs is not None)
    host = _host_kv_pool(config, kv, weights.device, files.context)
    if weights.ranks is not None:
        num_host = 0 if host is None else host.num_blocks
        weights.ranks.make_pools(kv.num_blocks, kv.block_size, dtype_name(kv.dtype), num_host)
    return Pools(kv, host, graphs)


def opens_graphs(config: GenerationServiceConfig, model: LanguageModel) -> bool:
    """True when callers may run the model's graphs: it has some where its layers are ours."""
    return config.is_model_open and isinstance(model, CausalLM)


def _kv_pool(
    config: GenerationServiceConfig, model: LanguageModel, device: Device, context: int, *, has_scrap: bool
) -> KVCachePool:
    facts, size = model.config, device.block_size(config.block_size)
    dtype = kv_cache_dtype(config.kv_cache_dtype, model.dtype)
    left = device.memory()
    # A slot for each sequence that runs; warm-up needs two.
    slots, snapshots = max(2, config.max_running_sequences), _num_snapshots(config, model, context)
    states = (slots + snapshots) * state_bytes(model.state_layout)
    blocks = kv_pool_blocks(
        parse_memory(config.kv_memory),
        # Of all processes that share this memory.
        bytes_per_block=kv_bytes_per_block(facts.num_layers, size, model.num_kv_heads, facts.head_dim, dtype)
        * (config.tensor_parallel if device.ranks_share_memory else 1),
        block_size=size,
        available=left.available - states,
        total=left.total,
        max_context_tokens=context,
        after=f"the weights and {format_size(states)} of states (--max-running-sequences, --state-snapshots)"
        if states
        else "the weights",
        # `auto` never takes more than every sequence at full length could use.
        max_blocks=config.max_running_sequences * -(-context // size),
    )
    kv = KVCachePool(
        facts.num_layers,
        blocks,
        size,
        model.num_kv_heads,
        facts.head_dim,
        dtype,
        device.torch_device,
        num_further_blocks=-(-config.graph_kv_tokens // size) if opens_graphs(config, model) else 0,
        has_scrap=has_scrap,
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


def _num_snapshots(config: GenerationServiceConfig, model: LanguageModel, context: int) -> int:
    """Return the number of states to keep for the prefix cache.

    Modules that go on from a state by one token only would compute the end of every prompt so, to have one. No prompt
    of a short context has one.
    """
    if not (config.prefix_cache and isinstance(model, StatefulModel) and model.continues):
        return 0
    return config.state_snapshots if context > config.state_snapshot_tokens else 0


def _host_kv_pool(config: GenerationServiceConfig, kv: KVCachePool, device: Device, context: int) -> HostKVPool | None:
    """Allocate the host pool; None: there is to be none. Raises StartupError naming --host-kv-memory."""
    flag = "--host-kv-memory"
    memory = parse_memory(config.host_kv_memory, flag=flag)
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
        block_size=kv.block_size,
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
