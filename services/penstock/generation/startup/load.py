"""Loading of all that an engine needs from a folder. Blocking: runs on a thread of its own."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from penstock.common.checkpoint import resolve_model
from penstock.common.errors import StartupError
from penstock.common.fingerprint import tokenizer_fingerprint
from penstock.common.logging import get_logger
from penstock.common.progress import LOAD_WEIGHTS, TUNE, WARM_UP, ShowProgress, Stage
from penstock.common.units import format_size
from penstock.generation.attention.kv_cache import KVCachePool, kv_bytes_per_block, kv_cache_dtype
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.model_config import ModelConfig
from penstock.generation.devices.base import Device
from penstock.generation.devices.registry import open_device
from penstock.generation.engine.admission import most_output_tokens
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.modes import MODES
from penstock.generation.grammar.state import MaskWorkers
from penstock.generation.host.arena import Arena
from penstock.generation.host.memory import format_weights, kv_pool_blocks, parse_memory, trim_heap
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model, read_model_config
from penstock.generation.options.hf_json import load_defaults
from penstock.generation.options.request_options import ModelDefaults, ModelFacts
from penstock.generation.runner.model_runner import ModelRunner
from penstock.generation.startup.batch_tuning import (
    LARGEST_SIZE,
    BatchTuning,
    PromptTimer,
    smallest_budget,
    tune_batch_tokens,
)
from penstock.generation.startup.draft_model import DraftModel, load_draft_weights, make_draft_model
from penstock.generation.startup.plugin_registry import NO_PLUGINS, PluginRegistry, load_plugins
from penstock.generation.weights.files import PACKED_FILE, is_packed
from penstock.generation.weights.tensor_names import EMBEDDING, LM_HEAD, tensor_shapes
from penstock.text.token_bytes import TokenBytes, TokenPrefixes, UnsupportedTokenizer

_log = get_logger("penstock.generation")
# Bytes per weight of a linear layer, with its part of the scales.
_QUANTISED_BYTES = {"int8": 1.0, "int4": 0.625}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory with its KV pool and the facts that requests are checked against."""

    model: CausalLM
    kv: KVCachePool
    runner: ModelRunner
    device: Device
    engine_config: EngineConfig
    served: ModelFacts
    defaults: ModelDefaults
    token_bytes: TokenBytes | None
    # For token healing; None where there is no table.
    token_prefixes: TokenPrefixes | None
    # Folder of its files.
    folder: Path
    batch: BatchTuning
    draft: DraftModel | None = None
    plugins: PluginRegistry = NO_PLUGINS

    def warm_up(self) -> None:
        """Run all models once. Writes into blocks of the pools, so none may be in use or cached."""
        self.runner.warm_up()
        if self.draft is not None:
            self.draft.warm_up()

    def status_lines(self) -> list[str]:
        """Return lines of facts for people."""
        model, kv = self.model, self.kv
        millions = model.config.num_parameters / 1e6
        tokens = kv.num_blocks * kv.block_size
        return [
            f"model     {self.served.name} ({model.config.architecture}, {millions:.1f} M parameters, "
            f"{model.config.dtype}, {format_weights(model.num_bytes, model.mapped_bytes)}) "
            f"on {self.device.describe()}",
            # Before the rest: `penstock serve` has room for three lines.
            *([] if (advice := self.device.advice()) is None else [f"advice    {advice}"]),
            f"kv pool   {format_size(kv.num_bytes)}: {kv.num_blocks} blocks of {kv.block_size} = {tokens} tokens"
            f"{' in int8' if kv.dtype is torch.int8 else ''}, context {self.served.max_context_tokens}",
            f"batch     {self.batch.describe()}",
            *([] if self.draft is None else [self.draft.status_line()]),
        ]


def load(config: GenerationServiceConfig, name: str, show: ShowProgress, arena: Arena | None = None) -> LoadedModel:
    """Load `config.model`, size the KV pool by the memory that is left, and run the model once.

    `show` gets the progress and may raise to give up. Weights go into `arena` while it has room; it is closed when they
    are loaded, or cannot be. Raises StartupError naming the flag to change.
    """
    with contextlib.ExitStack() as after_weights, ThreadPoolExecutor(1, "tables") as beside:
        if arena is not None:
            after_weights.callback(arena.close)
        return _load(config, name, show, arena, after_weights.close, beside)


def _load(
    config: GenerationServiceConfig,
    name: str,
    show: ShowProgress,
    arena: Arena | None,
    weights_are_loaded: Callable[[], None],
    beside: Executor,
) -> LoadedModel:
    timer = StartupTimer()
    kv_memory = parse_memory(config.kv_memory)
    plugins = load_plugins(config.logits_processor, config.stopping_criteria)
    folder = resolve_model(config.model, show=show)
    model_config = read_model_config(folder)
    context = _context(config.max_context, model_config)
    token_bytes = _token_bytes(folder, model_config)
    defaults = _defaults(folder, model_config, has_token_bytes=token_bytes is not None)
    # Frees tokenizer.json as objects, many times as large as the table.
    trim_heap()
    timer.end("tokenizer")
    # Runs beside the loading of weights, which needs the interpreter for moments only.
    prefixes = None if token_bytes is None else beside.submit(TokenPrefixes, token_bytes)
    device = open_device(config.device)
    device.start(num_threads=config.threads, kernels=config.kernels, arena=arena)
    _check_memory(folder, model_config, config.quantization, device, 0 if arena is None else arena.num_touched)
    model, draft_weights = _weights(config, folder, name, device, show)
    weights_are_loaded()
    if prefixes is not None:
        # No other work may run while steps are measured.
        wait([prefixes])
    timer.end("weights")
    kv = _kv_pool(config, kv_memory, model, device, context)
    masks = MaskWorkers(model_config.vocab_size, config.mask_threads)
    runner = ModelRunner(model, kv, masks=masks, kernels=device.sampling_kernels())
    # Before the warm-up, which writes into the KV pool: the memory of large steps then does not add to the pool's.
    batch = _batch(config, model, kv, device, show)
    trim_heap()
    timer.end("tuning")
    with Stage(show, WARM_UP, name):
        runner.warm_up()
    timer.end("warm_up")
    engine_config = _engine_config(config, kv, context, batch.tokens)
    draft = None if draft_weights is None else make_draft_model(config, draft_weights, device, engine_config, masks)
    most_tokens = partial(most_output_tokens, engine_config, MODES)
    served = _served(name, folder, model_config, context, has_token_bytes=token_bytes is not None)
    served = replace(served, assistant_model="" if draft is None else draft.name, max_output_tokens=most_tokens)
    # Frees the memory that reading and packing needed for a moment.
    trim_heap()
    timer.end("rest")
    _log.info(
        "loaded",
        seconds=timer.seconds,
        weights_bytes=model.num_bytes,
        mapped_bytes=model.mapped_bytes,
        kv_bytes=kv.num_bytes,
    )
    found = None if prefixes is None else prefixes.result()
    return LoadedModel(
        model, kv, runner, device, engine_config, served, defaults, token_bytes, found, folder, batch, draft, plugins
    )


def _weights(
    config: GenerationServiceConfig, folder: Path, name: str, device: Device, show: ShowProgress
) -> tuple[CausalLM, CausalLM | None]:
    """Load the model and the draft model, before the KV pool, which takes a share of the memory that both leave."""
    with Stage(show, LOAD_WEIGHTS, name) as stage:
        model = load_model(
            folder,
            dtype=config.dtype,
            quantization=config.quantization,
            device=device,
            progress=stage.count,
            map_embeddings=config.map_embeddings,
        )
    return model, load_draft_weights(config, folder, device, show)


def _served(name: str, folder: Path, model: ModelConfig, context: int, *, has_token_bytes: bool) -> ModelFacts:
    """Return the facts that requests are checked against, as far as the files give them."""
    return ModelFacts(
        name=name,
        vocab_size=model.vocab_size,
        max_context_tokens=context,
        tokenizer_fingerprint=tokenizer_fingerprint(folder),
        has_token_bytes=has_token_bytes,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        tied_embeddings=model.tie_word_embeddings,
    )


def _defaults(folder: Path, model: ModelConfig, *, has_token_bytes: bool) -> ModelDefaults:
    """Read generation_config.json. Raises StartupError for options that need a tokenizer where there is none."""
    defaults, ignored = load_defaults(folder, model.eos_token_ids, model.vocab_size, model.num_layers)
    if ignored:
        _log.warning("generation_config.json asks for what this release does not do", fields=list(ignored))
    if defaults.stop_strings and not has_token_bytes:
        raise StartupError("generation_config.json has stop_strings, which need a tokenizer.json", flag="MODEL")
    if defaults.options.token_healing and not has_token_bytes:
        raise StartupError("generation_config.json has token_healing, which needs a tokenizer.json", flag="MODEL")
    pad = model.pad_token_id if defaults.pad_token_id is None else defaults.pad_token_id
    bos = model.bos_token_id if defaults.bos_token_id is None else defaults.bos_token_id
    # A pad id outside the vocabulary is common, and no group of beams can count as such a token.
    pad, bos = (one if one is not None and one < model.vocab_size else None for one in (pad, bos))
    return replace(defaults, pad_token_id=pad, bos_token_id=bos)


def _context(wanted: int | None, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if wanted is not None and wanted > longest:
        raise StartupError(f"--max-context {wanted} is more than the model's {longest}", flag="--max-context")
    return wanted or longest


def _token_bytes(folder: Path, model: ModelConfig) -> TokenBytes | None:
    """Return the table with which stop strings are matched; None when the folder's tokenizer does not allow one."""
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


def _check_memory(folder: Path, model: ModelConfig, quantization: str, device: Device, at_hand: int) -> None:
    """Refuse weights that do not fit into memory. `at_hand` bytes are already taken for them."""
    # A link whose file is gone, as a cleaned-up hub cache leaves it, is reported by the loader.
    packed = is_packed(folder)
    files = folder.glob(PACKED_FILE if packed else "*.safetensors")
    stored = sum(path.stat().st_size for path in files if path.is_file())
    weights = stored if packed else _loaded_bytes(stored, model, quantization)
    available = device.memory().available + at_hand
    if weights > available:
        raise StartupError(
            f"the weights take {format_size(weights)} and {format_size(available)} of memory is free: "
            "choose a smaller MODEL",
            flag="MODEL",
        )


def _loaded_bytes(stored: int, model: ModelConfig, quantization: str) -> int:
    """Estimate the bytes that `stored` bytes of weights take once they are quantised."""
    if quantization not in _QUANTISED_BYTES:
        return stored
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(model).items()}
    table, total = sizes[EMBEDDING], sum(sizes.values())
    layers = total - table - sizes.get(LM_HEAD, 0)
    # The embedding's table stays as it is. The head is int8 with either quantization, also where the two are tied.
    return int(stored * table / total + table * _QUANTISED_BYTES["int8"] + layers * _QUANTISED_BYTES[quantization])


def _kv_pool(
    config: GenerationServiceConfig, memory: int | None, model: CausalLM, device: Device, context: int
) -> KVCachePool:
    facts, size = model.config, config.block_size
    dtype = kv_cache_dtype(config.kv_cache_dtype, model.dtype)
    blocks = kv_pool_blocks(
        memory,
        bytes_per_block=kv_bytes_per_block(facts.num_layers, size, facts.num_kv_heads, facts.head_dim, dtype),
        block_size=size,
        available=device.memory().available,
        max_context_tokens=context,
        # `auto` never takes more than every sequence at full length could use.
        max_blocks=config.max_running_sequences * -(-context // size),
    )
    return KVCachePool(facts.num_layers, blocks, size, facts.num_kv_heads, facts.head_dim, dtype, device.torch_device)


def _batch(
    config: GenerationServiceConfig, model: CausalLM, kv: KVCachePool, device: Device, show: ShowProgress
) -> BatchTuning:
    if config.max_batch_tokens is not None:
        return BatchTuning(config.max_batch_tokens)
    _log.info("measuring step sizes", at_most_seconds=config.tune_seconds)
    with Stage(show, TUNE):
        timer = PromptTimer(model, kv, device, most_tokens=LARGEST_SIZE)
        tuned = tune_batch_tokens(
            timer,
            smallest=smallest_budget(config.max_running_sequences),
            largest=timer.longest_prompt,
            step_seconds=config.target_step_seconds,
            spend_seconds=config.tune_seconds,
        )
    _log.info("batch size", batch=tuned.describe())
    return tuned


def _engine_config(config: GenerationServiceConfig, kv: KVCachePool, context: int, batch_tokens: int) -> EngineConfig:
    return EngineConfig(
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        max_context_tokens=context,
        max_batch_tokens=batch_tokens,
        max_running_sequences=config.max_running_sequences,
        max_queued_requests=config.max_queued_requests,
        max_draft_rows=config.max_draft_rows,
        deadline_headroom=config.deadline_headroom,
        tenant_share=config.tenant_share,
        tenant_slowdown=config.tenant_slowdown,
        tenant_memory_seconds=config.tenant_memory_seconds,
        prefix_cache=config.prefix_cache,
        dump_groups=config.dump_groups,
        dump_sequences=config.dump_sequences,
        dump_wait_seconds=config.dump_wait_seconds,
        heartbeat_seconds=config.heartbeat_seconds,
        overdue_step_factor=config.overdue_step_factor,
        hung_step_seconds=config.hung_step_seconds,
        hung_step_factor=config.hung_step_factor,
    )


class StartupTimer:
    """Timer of the parts of a start: seconds of each, in order. The first begins now."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def end(self, name: str) -> None:
        """End the part `name`, which began when the part before it ended."""
        now = time.perf_counter()
        self.seconds[name] = round(now - self._began, 3)
        self._began = now
