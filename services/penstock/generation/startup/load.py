"""Loading of all that an engine needs from a folder. Blocking: runs on a thread of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from penstock.common.checkpoint import resolve_model
from penstock.common.environment import current_environment
from penstock.common.errors import InvalidArgument, PenstockError, StartupError
from penstock.common.fingerprint import tokenizer_fingerprint
from penstock.common.heap import trim_heap
from penstock.common.logging import get_logger
from penstock.common.options import values_of
from penstock.common.progress import (
    LOAD_WEIGHTS,
    TUNE,
    WARM_UP,
    CountBytes,
    IfCancelled,
    ShowProgress,
    Stage,
    never_cancelled,
)
from penstock.common.units import format_size
from penstock.generation.adapters.peft_folder import PeftFolder
from penstock.generation.adapters.store import AdapterStore, OpenAdapter
from penstock.generation.attention.host_kv import HostKVPool
from penstock.generation.attention.kv_cache import KVCachePool, kv_bytes_per_block, kv_cache_dtype
from penstock.generation.attention.state_pool import StatePool, new_states, state_bytes
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.model_config import ModelConfig
from penstock.generation.devices.base import Device
from penstock.generation.devices.registry import open_device
from penstock.generation.engine.admission import most_output_tokens
from penstock.generation.engine.config import EngineConfig, EngineOptions
from penstock.generation.engine.decoding.modes import MODES
from penstock.generation.grammar.state import MaskWorkers
from penstock.generation.host.arena import Arena
from penstock.generation.host.memory import format_weights, kv_pool_blocks, parse_memory
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import load_model, read_model_config
from penstock.generation.models.transformers_states import StatefulModel
from penstock.generation.options.hf_json import load_defaults
from penstock.generation.options.request_options import ModelDefaults, ModelFacts
from penstock.generation.options.validate import unsupported_option
from penstock.generation.parallel.launch import Place
from penstock.generation.parallel.leader import LeaderModel, lead
from penstock.generation.parallel.meeting import Meeting
from penstock.generation.parallel.processes import Ranks
from penstock.generation.runner.model_runner import ModelRunner, WarmUpWork
from penstock.generation.startup.batch_tuning import (
    LARGEST_SIZE,
    BatchTuning,
    PromptTimer,
    smallest_budget,
    tune_batch_tokens,
)
from penstock.generation.startup.draft_model import DraftModel, load_draft_weights, make_draft_model
from penstock.generation.startup.memory_check import check_kv_memory, check_weights, stored_weight_bytes
from penstock.generation.startup.plugin_registry import NO_PLUGINS, PluginRegistry, load_plugins
from penstock.generation.startup.vocabulary import read_token_bytes
from penstock.generation.weights.files import is_packed, least_weight_bytes
from penstock.generation.weights.sharding import FLAG, Shard
from penstock.text.token_bytes import TokenBytes, TokenPrefixes

_log = get_logger("penstock.generation")
# Fields of ModelConfig that loading sets, and those that it sets in the fallback.
_LOADED = ("dtype", "num_parameters", "weight_forms")
_RECORDED = ("num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory with its KV pool and the facts that requests are checked against."""

    model: LanguageModel
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
    # Folder of its tokenizer.json; None: it is not to be read.
    tokenizer_folder: Path | None
    batch: BatchTuning
    adapters: AdapterStore
    draft: DraftModel | None = None
    plugins: PluginRegistry = NO_PLUGINS
    # Memory of the host pool; None: there is none.
    host_kv: HostKVPool | None = None
    # Further processes that have a part of the model; None: there are none.
    ranks: Ranks | None = None

    def close(self) -> None:
        """End the processes beside this one. Nothing may run any more."""
        if self.ranks is not None:
            self.ranks.close()

    def warm_up(self, work: WarmUpWork | None = None) -> None:
        """Run all models once, this one with `work`. Writes into blocks of the pools, so none may be in use or
        cached."""
        self.runner.warm_up(work)
        if self.draft is not None:
            self.draft.warm_up()

    def status_lines(self) -> list[str]:
        """Return lines of facts for people."""
        model, kv = self.model, self.kv
        millions = model.config.num_parameters / 1e6
        tokens = kv.num_blocks * kv.block_size
        return [
            f"model     {self.served.name} ({model.config.architecture}{_by(model)}, {millions:.1f} M parameters, "
            f"{_number_formats(model.config)}, {format_weights(model.num_bytes, model.mapped_bytes)}) "
            f"on {self.device.describe()}",
            # Before the rest: `penstock serve` has room for three lines.
            *([] if (advice := self.device.advice()) is None else [f"advice    {advice}"]),
            f"kv pool   {format_size(kv.num_bytes)}: {kv.num_blocks} blocks of {kv.block_size} = {tokens} tokens"
            f"{' in int8' if kv.dtype is torch.int8 else ''}, context {self.served.max_context_tokens}",
            *([] if kv.states is None else [_states_line(kv.states)]),
            *([] if self.host_kv is None else [_host_line(self.host_kv, self.engine_config)]),
            f"batch     {self.batch.describe()}",
            *([] if self.draft is None else [self.draft.status_line()]),
            *([] if self.ranks is None else [f"ranks     {self.ranks.group.shard.count} processes have a part each"]),
        ]


def load(
    config: GenerationServiceConfig,
    name: str,
    show: ShowProgress,
    arena: Arena | None = None,
    if_cancelled: IfCancelled = never_cancelled,
) -> LoadedModel:
    """Load `config.model`, size the KV pool by the memory that is left, and run the model once.

    `show` gets the progress and may raise to give up; `if_cancelled` gets what ends a wait for other processes. Weights
    go into `arena` while it has room; it is closed when they are loaded, or cannot be. Raises StartupError naming the
    flag to change.
    """
    with (
        contextlib.ExitStack() as after_weights,
        ThreadPoolExecutor(1, "tables") as beside,
        contextlib.ExitStack() as if_failed,
    ):
        if arena is not None:
            after_weights.callback(arena.close)
        loaded = _load(config, name, show, arena, after_weights.close, beside, if_failed, if_cancelled)
        if_failed.pop_all()
        return loaded


def load_again(config: GenerationServiceConfig, loaded: LoadedModel, count: CountBytes) -> LoadedModel:
    """Return `loaded` with weights, device and runner made anew; the KV pool and all else are the same.

    Both models are in memory until the caller lets the old one go. `count` gets the bytes and may raise to give up.
    Raises StartupError when the folder cannot be read, holds another model or tokenizer, or memory is short.
    """
    if loaded.ranks is not None:
        raise StartupError(f"a model of several processes is not read again: start anew ({FLAG})", flag=FLAG)
    folder, old = loaded.folder, loaded.model.config
    # The loader sets these.
    known = {name: getattr(old, name) for name in (*_LOADED, *(_RECORDED if old.route == "fallback" else ()))}
    found = replace(read_model_config(folder, config.route), **known)
    tokenizer = "" if loaded.tokenizer_folder is None else tokenizer_fingerprint(loaded.tokenizer_folder)
    if found != old or tokenizer != loaded.served.tokenizer_fingerprint:
        raise StartupError("MODEL's folder holds another model or tokenizer: start a process for it", flag="MODEL")
    device = open_device(config.device)
    device.start(num_threads=config.threads, kernels=config.kernels)
    _check_room(config, folder, found, None, device.memory().available)
    model = load_model(
        folder,
        dtype=config.dtype,
        quantization=config.quantization,
        device=device,
        progress=count,
        map_embeddings=config.map_embeddings,
        route=config.route,
    )
    if model.config != old:
        raise StartupError("MODEL's weights have another number format: start a process for them", flag="MODEL")
    trim_heap()
    return replace(loaded, model=model, device=device, runner=loaded.runner.over(model))


def _load(
    config: GenerationServiceConfig,
    name: str,
    show: ShowProgress,
    arena: Arena | None,
    weights_are_loaded: Callable[[], None],
    beside: Executor,
    if_failed: contextlib.ExitStack,
    if_cancelled: IfCancelled,
) -> LoadedModel:
    timer = StartupTimer()
    kv_memory = parse_memory(config.kv_memory)
    plugins = load_plugins(config.logits_processor, config.stopping_criteria)
    folder = resolve_model(config.model, show=show)
    model_config = read_model_config(folder, config.route)
    if arena is not None and model_config.route == "fallback":
        # transformers reads all weights into memory of its own first.
        arena.close()
        arena = None
    context = _context(config.max_context, model_config)
    tokenizer_folder = _tokenizer_folder(config, folder, show)
    token_bytes = None if tokenizer_folder is None else read_token_bytes(tokenizer_folder, model_config)
    defaults = _defaults(folder, model_config, has_token_bytes=token_bytes is not None)
    # Frees tokenizer.json as objects, many times as large as the table.
    trim_heap()
    timer.end("tokenizer")
    # Runs beside the loading of weights, which needs the interpreter for moments only.
    prefixes = None if token_bytes is None else beside.submit(TokenPrefixes, token_bytes)
    device = open_device(config.device)
    ranks = _ranks(config, folder, model_config, device, if_cancelled)
    if ranks is not None:
        if_failed.callback(ranks.close)
        if_cancelled(ranks.close)
    device.start(num_threads=config.rank_threads, kernels=config.kernels, arena=arena)
    # Memory that is already taken for the weights counts as free.
    available = device.memory().available + (0 if arena is None else arena.num_touched)
    # What the ranks of a model have in all.
    whole = available if device.ranks_share_memory else available * config.tensor_parallel
    _check_room(config, folder, model_config, kv_memory, whole)
    model, draft_weights = _weights(config, folder, name, device, show, ranks)
    weights_are_loaded()
    _check_defaults(defaults, model)
    if prefixes is not None:
        # No other work may run while steps are measured.
        wait([prefixes])
    timer.end("weights")
    # Before the KV pool, which takes a share of the memory that is left.
    adapters = _adapters(config, name, model)
    graphs = device.graph_capture() if config.capture_steps else None
    kv = _kv_pool(config, kv_memory, model, device, context, has_scrap=graphs is not None)
    host_kv = _host_kv_pool(config, kv, device, context)
    if ranks is not None:
        dtype = str(kv.dtype).removeprefix("torch.")
        ranks.make_pools(kv.num_blocks, kv.block_size, dtype, 0 if host_kv is None else host_kv.num_blocks)
    masks = MaskWorkers(model_config.vocab_size, config.mask_threads)
    runner = ModelRunner(
        model,
        kv,
        masks=masks,
        kernels=device.sampling_kernels(),
        host=host_kv,
        graphs=graphs,
        most_captured_rows=config.max_running_sequences,
    )
    # Before the warm-up, which writes into the KV pool: the memory of large steps then does not add to the pool's.
    batch = _batch(config, model, kv, device, show)
    trim_heap()
    timer.end("tuning")
    with Stage(show, WARM_UP, name):
        runner.warm_up()
    timer.end("warm_up")
    if window := window_of(model):
        _log.info("every layer has a window: blocks behind it are given back while a sequence goes on", window=window)
    engine_config = _engine_config(config, kv, host_kv, context, batch.tokens, window)
    draft = None if draft_weights is None else make_draft_model(config, draft_weights, device, engine_config, masks)
    most_tokens = partial(most_output_tokens, engine_config, MODES)
    served = _served(name, tokenizer_folder, model, context, has_token_bytes=token_bytes is not None)
    served = replace(
        served,
        loads_tokenizer=config.load_tokenizer,
        assistant_model="" if draft is None else draft.name,
        max_output_tokens=most_tokens,
        has_adapter=adapters.__contains__,
    )
    # Frees the memory that reading and packing needed for a moment.
    trim_heap()
    timer.end("rest")
    _log.info(
        "loaded",
        route=model.config.route,
        seconds=timer.seconds,
        weights_bytes=model.num_bytes,
        mapped_bytes=model.mapped_bytes,
        kv_bytes=kv.num_bytes,
        **_quantised(model.config),
    )
    found = None if prefixes is None else prefixes.result()
    return LoadedModel(
        model,
        kv,
        runner,
        device,
        engine_config,
        served,
        defaults,
        token_bytes,
        found,
        folder,
        tokenizer_folder,
        batch,
        adapters,
        draft,
        plugins,
        host_kv,
        ranks,
    )


def _check_room(
    config: GenerationServiceConfig, folder: Path, model: ModelConfig, kv_memory: int | None, available: int
) -> None:
    """Refuse weights, and a KV pool beside them, that `available` bytes cannot hold, before any is read."""
    # Transformers reads all of them before any is quantised.
    is_as_stored = is_packed(folder) or model.route == "fallback"
    check_weights(stored_weight_bytes(folder), None if is_as_stored else model, config.quantization, available)
    if kv_memory is not None and not is_as_stored:
        least = least_weight_bytes(folder, config.dtype, config.quantization, map_embeddings=config.map_embeddings)
        check_kv_memory(least, kv_memory, available)


def _check_defaults(defaults: ModelDefaults, model: LanguageModel) -> None:
    """Refuse a generation_config.json that asks of every request what the model cannot do."""
    if (option := unsupported_option(defaults.options, model.unsupported)) is not None:
        field = option.removeprefix("config.")
        raise StartupError(f"generation_config.json: {field} {model.unsupported[option]}", flag="MODEL")


def _number_formats(model: ModelConfig) -> str:
    """Return the dtype, and for a quantised checkpoint its format and the number of matrices in each form."""
    if not model.checkpoint_format:
        return model.dtype
    forms = ", ".join(f"{count} as {form}" for form, count in model.weight_forms)
    return f"{model.dtype}, {model.checkpoint_format}: {forms or 'packed'}"


def _quantised(model: ModelConfig) -> dict[str, object]:
    """Facts of a quantised checkpoint, for the log."""
    if not model.checkpoint_format:
        return {}
    return {"checkpoint_format": model.checkpoint_format, "weight_forms": dict(model.weight_forms)}


def opens_graphs(config: GenerationServiceConfig, model: LanguageModel) -> bool:
    """True when callers may run the model's graphs: it has some where its layers are ours."""
    return config.is_model_open and isinstance(model, CausalLM)


def adapter_opener(config: GenerationServiceConfig, model: LanguageModel) -> OpenAdapter:
    """Return the function that checks and reads a PEFT folder for `model`. It raises InvalidArgument
    (ADAPTER_UNSUPPORTED) where the model takes none."""
    limits = config.adapter_limits()

    def opened(path: Path, root: Path | None) -> PeftFolder:
        if not isinstance(model, CausalLM | LeaderModel):
            raise InvalidArgument(
                "path",
                "is an adapter, and this model takes none, since transformers' modules run it: merge it",
                reason="ADAPTER_UNSUPPORTED",
            )
        return PeftFolder(path, root, model, limits)

    return opened


def _adapters(config: GenerationServiceConfig, name: str, model: LanguageModel) -> AdapterStore:
    """Return the store with the adapters of --lora in it. Raises StartupError."""
    limits = config.adapter_limits()
    store = AdapterStore(limits, adapter_opener(config, model), reserved=name)
    for adapter, folder in config.adapters_to_load().items():
        try:
            store.load(adapter, Path(folder))
        except PenstockError as error:
            raise StartupError(f"--lora {adapter}={folder}: {error.message}", flag="--lora") from error
    if config.lora:
        _log.info("adapters", names=list(store.names()), bytes=store.figures().num_bytes)
    return store


def _ranks(
    config: GenerationServiceConfig, folder: Path, model: ModelConfig, device: Device, if_cancelled: IfCancelled
) -> Ranks | None:
    """Start the other ranks, which load their parts while this process loads its own; None: there are none.

    Where a launcher has started this process as rank 0, its other processes are the ranks.
    """
    if config.tensor_parallel == 1:
        return None
    Shard(0, config.tensor_parallel).check(model)
    meeting = None
    if (place := Place.of(current_environment(), config.tensor_parallel)) is not None:
        meeting = Meeting(place)
        if_cancelled(meeting.close)
    order = {
        "folder": str(folder),
        "dtype": config.dtype,
        "quantization": config.quantization,
        "threads": config.rank_threads,
        "kernels": config.kernels,
        "map_embeddings": config.map_embeddings,
        "log_format": config.log_format,
        "log_level": config.log_level,
        "debug": config.debug,
        "log_lines": config.log_lines,
        "log_seconds": config.log_seconds,
    }
    return Ranks(config.tensor_parallel, device, order, meeting)


def _weights(
    config: GenerationServiceConfig, folder: Path, name: str, device: Device, show: ShowProgress, ranks: Ranks | None
) -> tuple[LanguageModel, LanguageModel | None]:
    """Load the model and the draft model, before the KV pool, which takes a share of the memory that both leave."""
    with Stage(show, LOAD_WEIGHTS, name) as stage:
        model = load_model(
            folder,
            dtype=config.dtype,
            quantization=config.quantization,
            device=device,
            progress=stage.count,
            map_embeddings=config.map_embeddings,
            route=config.route,
            shard=None if ranks is None else ranks.group.shard,
            sum_parts=None if ranks is None else ranks.group.sum,
        )
    if ranks is not None:
        assert isinstance(model, CausalLM), "only native models are spread"
        model = lead(folder, model, ranks)
        ranks.wait_loaded()
    return model, load_draft_weights(config, folder, device, show)


def _served(
    name: str, tokenizer_folder: Path | None, loaded: LanguageModel, context: int, *, has_token_bytes: bool
) -> ModelFacts:
    """Return the facts that requests are checked against, as far as model and files give them."""
    model = loaded.config
    return ModelFacts(
        name=name,
        vocab_size=model.vocab_size,
        max_context_tokens=context,
        tokenizer_fingerprint="" if tokenizer_folder is None else tokenizer_fingerprint(tokenizer_folder),
        has_token_bytes=has_token_bytes,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        tied_embeddings=model.tie_word_embeddings,
        unsupported=loaded.unsupported,
    )


def _tokenizer_folder(config: GenerationServiceConfig, folder: Path, show: ShowProgress) -> Path | None:
    """Return the folder of the tokenizer; None with --no-load-tokenizer. Raises StartupError naming
    --tokenizer-path."""
    if not config.load_tokenizer:
        return None
    if config.tokenizer_path is None:
        return folder
    try:
        return resolve_model(config.tokenizer_path, show=show)
    except StartupError as error:
        raise StartupError(f"--tokenizer-path: {error.message}", flag="--tokenizer-path") from error


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


def _kv_pool(
    config: GenerationServiceConfig,
    memory: int | None,
    model: LanguageModel,
    device: Device,
    context: int,
    *,
    has_scrap: bool,
) -> KVCachePool:
    facts, size = model.config, device.block_size(config.block_size)
    dtype = kv_cache_dtype(config.kv_cache_dtype, model.dtype)
    left = device.memory()
    # A slot for each sequence that runs; warm-up needs two.
    slots, snapshots = max(2, config.max_running_sequences), _num_snapshots(config, model, context)
    states = (slots + snapshots) * state_bytes(model.state_layout)
    blocks = kv_pool_blocks(
        memory,
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


def _by(model: LanguageModel) -> str:
    """Return a remark on the code that runs the model, for people; empty for ours."""
    return " by transformers" if model.config.route == "fallback" else ""


def _states_line(states: StatePool) -> str:
    """Return a line for people on the states."""
    snapshots = f"{states.num_snapshots} snapshots for the prefix cache" if states.num_snapshots else "no prefix cache"
    return f"states    {format_size(states.num_bytes)}: {states.num_slots} sequences, {snapshots}"


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


def _host_line(host: HostKVPool, config: EngineConfig) -> str:
    """Return a line for people on the host pool."""
    prefixes = ", evicted prefixes are kept" if config.prefix_cache and config.host_prefix_cache else ""
    way = f"preemption by {config.preemption}"
    return f"host pool {format_size(host.num_bytes)}: {host.num_blocks} blocks, {way}{prefixes}"


def _batch(
    config: GenerationServiceConfig, model: LanguageModel, kv: KVCachePool, device: Device, show: ShowProgress
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


def window_of(model: LanguageModel) -> int:
    """Return the most positions that a row of any layer reads, its own included; 0: all."""
    windows = model.windows
    if not windows or model.state_layout or None in windows:
        return 0
    return max(window for window in windows if window is not None) + model.attention.reads_behind


def _engine_config(
    config: GenerationServiceConfig,
    kv: KVCachePool,
    host_kv: HostKVPool | None,
    context: int,
    batch_tokens: int,
    window: int,
) -> EngineConfig:
    states = kv.states
    if states is not None and not states.num_snapshots:
        config = replace(config, prefix_cache=False)
    return EngineConfig(
        **values_of(EngineOptions, config),
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        max_context_tokens=context,
        max_batch_tokens=batch_tokens,
        window=window,
        keeps_states=states is not None,
        num_state_snapshots=0 if states is None else states.num_snapshots,
        num_host_blocks=0 if host_kv is None else host_kv.num_blocks,
        block_bytes=kv.bytes_per_block,
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
