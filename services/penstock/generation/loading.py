"""From a folder to everything an engine needs. Blocking: runs on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.common.checkpoint import resolve_model
from penstock.common.errors import StartupError
from penstock.common.fingerprint import tokenizer_fingerprint
from penstock.common.logging import get_logger
from penstock.common.token_bytes import TokenBytes, UnsupportedTokenizer
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.defaults import load_defaults
from penstock.generation.devices.base import Device
from penstock.generation.devices.memory import format_memory, kv_pool_blocks, parse_memory
from penstock.generation.devices.registry import open_device
from penstock.generation.engine.config import EngineConfig
from penstock.generation.models.config import ModelConfig
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model, read_model_config
from penstock.generation.requested import ModelDefaults, ServedModel
from penstock.generation.runner.kv_cache import KVCachePool, kv_bytes_per_block
from penstock.generation.runner.model_runner import ModelRunner

_log = get_logger("penstock.generation")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory with its KV pool and the facts that requests are checked against."""

    model: CausalLM
    kv: KVCachePool
    runner: ModelRunner
    device: Device
    engine_config: EngineConfig
    served: ServedModel
    defaults: ModelDefaults
    token_bytes: TokenBytes | None

    def status_lines(self) -> list[str]:
        """Facts for people."""
        model, kv = self.model, self.kv
        millions = model.config.num_parameters / 1e6
        tokens = kv.num_blocks * kv.block_size
        return [
            f"model     {self.served.name} ({model.config.architecture}, {millions:.1f} M parameters, "
            f"{model.config.dtype}, {format_memory(model.num_bytes)}) on {self.device.describe()}",
            f"kv pool   {format_memory(kv.num_bytes)}: {kv.num_blocks} blocks of {kv.block_size} = {tokens} tokens, "
            f"context {self.served.max_context_tokens}",
        ]


def load(config: GenerationServiceConfig, name: str, progress: Callable[[float], None]) -> LoadedModel:
    """Load `config.model`, size the KV pool by what is left, and run the model once.

    `progress` gets percentages and may raise to give up. Raises StartupError naming the flag to change.
    """
    kv_memory = parse_memory(config.kv_memory)
    folder = resolve_model(config.model)
    model_config = read_model_config(folder)
    context = _context(config.max_context, model_config)
    token_bytes = _token_bytes(folder, model_config)
    defaults, ignored = load_defaults(folder, model_config.eos_token_ids, model_config.vocab_size)
    if ignored:
        _log.warning("generation_config.json asks for what this release does not do", fields=list(ignored))
    if defaults.stop_strings and token_bytes is None:
        raise StartupError("generation_config.json has stop_strings, which need a tokenizer.json", flag="MODEL")
    device = open_device(config.device)
    device.start(num_threads=config.threads)
    _check_memory(folder, device)
    model = load_model(folder, dtype=config.dtype, device=device, progress=progress)
    kv = _kv_pool(config, kv_memory, model, device, context)
    engine_config = _engine_config(config, kv, context)
    runner = ModelRunner(model, kv)
    runner.warm_up()
    served = ServedModel(
        name=name,
        vocab_size=model_config.vocab_size,
        max_context_tokens=context,
        tokenizer_fingerprint=tokenizer_fingerprint(folder),
        has_token_bytes=token_bytes is not None,
        max_output_tokens=engine_config.max_output_tokens,
    )
    return LoadedModel(model, kv, runner, device, engine_config, served, defaults, token_bytes)


def _context(wanted: int | None, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if wanted is not None and wanted > longest:
        raise StartupError(f"--max-context {wanted} is more than the model's {longest}", flag="--max-context")
    return wanted or longest


def _token_bytes(folder: Path, model: ModelConfig) -> TokenBytes | None:
    """The table that stop strings are matched with; None when the folder's tokenizer does not allow one."""
    try:
        table = TokenBytes.from_folder(folder)
    except UnsupportedTokenizer as error:
        _log.warning("stop strings are refused", cause=str(error))
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StartupError("tokenizer.json of the model is broken", flag="MODEL") from error
    if len(table) > model.vocab_size:
        raise StartupError(
            f"tokenizer.json has {len(table)} ids and the model a vocabulary of {model.vocab_size}: "
            "they do not belong together",
            flag="MODEL",
        )
    return table


def _check_memory(folder: Path, device: Device) -> None:
    """Refuse before the operating system kills: the weights alone must fit."""
    # A link whose file is gone, as a cleaned-up hub cache leaves them, is the loader's to report.
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())
    available = device.memory().available
    if weights > available:
        raise StartupError(
            f"the weights take {format_memory(weights)} and {format_memory(available)} of memory is free: "
            "choose a smaller MODEL",
            flag="MODEL",
        )


def _kv_pool(
    config: GenerationServiceConfig, memory: int | None, model: CausalLM, device: Device, context: int
) -> KVCachePool:
    facts, size = model.config, config.block_size
    blocks = kv_pool_blocks(
        memory,
        bytes_per_block=kv_bytes_per_block(facts.num_layers, size, facts.num_kv_heads, facts.head_dim, model.dtype),
        block_size=size,
        available=device.memory().available,
        max_context_tokens=context,
        # `auto` never takes more than every sequence at full length could use.
        max_blocks=config.max_running_sequences * -(-context // size),
    )
    return KVCachePool(
        facts.num_layers, blocks, size, facts.num_kv_heads, facts.head_dim, model.dtype, device.torch_device
    )


def _engine_config(config: GenerationServiceConfig, kv: KVCachePool, context: int) -> EngineConfig:
    return EngineConfig(
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        max_context_tokens=context,
        max_batch_tokens=config.max_batch_tokens,
        max_running_sequences=config.max_running_sequences,
        max_queued_requests=config.max_queued_requests,
        prefix_cache=config.prefix_cache,
    )
