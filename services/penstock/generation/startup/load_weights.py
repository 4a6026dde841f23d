"""Second step of a start: a device, and all weights in its memory: the model's, a draft model's, the adapters'."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.common.environment import current_environment
from penstock.common.errors import InvalidArgument, PenstockError, StartupError
from penstock.common.logging import get_logger
from penstock.common.progress import LOAD_WEIGHTS, ProgressStage
from penstock.generation.adapters.peft_folder import PeftFolder
from penstock.generation.adapters.store import AdapterStore, OpenAdapter
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.model_config import ModelConfig
from penstock.generation.devices.base import Device
from penstock.generation.devices.device_registry import open_device
from penstock.generation.devices.torch_dtypes import named_dtype
from penstock.generation.host.memory import REST, format_weights, parse_memory
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.draft_head import DraftHead
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.options.request_options import ModelDefaults
from penstock.generation.options.validate import unsupported_option
from penstock.generation.parallel.launch import Rendezvous
from penstock.generation.parallel.leader import LeaderModel, lead
from penstock.generation.parallel.meeting import Meeting
from penstock.generation.parallel.processes import Ranks
from penstock.generation.startup.draft_model import load_draft_weights
from penstock.generation.startup.format_warning import warn_of_format, warn_of_whole_weights
from penstock.generation.startup.load_head import load_draft_head
from penstock.generation.startup.memory_check import (
    check_kv_memory,
    check_least_kv,
    check_weights,
    stored_weight_bytes,
)
from penstock.generation.startup.preload import Begun
from penstock.generation.startup.read_files import ModelFiles
from penstock.generation.startup.read_model import read_model
from penstock.generation.startup.start import Start
from penstock.generation.weights.files import is_packed, least_weight_bytes
from penstock.generation.weights.sharding import Shard

_log = get_logger("penstock.generation")


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights in memory, on the device that computes with them."""

    device: Device
    model: LanguageModel
    # Of the draft model; None: there is none.
    draft: LanguageModel | None
    # Trained to draft for the model; None: there is none.
    head: DraftHead | None
    adapters: AdapterStore
    # Further processes that have a part of the model; None: there are none.
    ranks: Ranks | None

    def close(self) -> None:
        """End the processes beside this one. Nothing may run any more."""
        if self.ranks is not None:
            self.ranks.close()

    def status_line(self, name: str) -> str:
        """Return a line of facts for people; `name` is the model's to callers."""
        model, config = self.model, self.model.config
        by = " by transformers" if config.route == "fallback" else ""
        return (
            f"model     {name} ({config.architecture}{by}, {config.num_parameters / 1e6:.1f} M parameters, "
            f"{_number_formats(config)}, {format_weights(model.num_bytes, model.mapped_bytes)}) "
            f"on {self.device.describe()}"
        )


def load_weights(start: Start, files: ModelFiles, begun: Begun) -> LoadedWeights:
    """Load all weights, before the pools, which take a share of the memory that these leave.

    The model's go into the memory that was `begun` while it has room; it is closed then. Raises StartupError naming the
    flag.
    """
    config, arena = start.config, begun.arena
    if arena is not None and files.config.route == "fallback":
        # transformers reads all weights into memory of its own first.
        arena.close()
        arena = None
    device = open_device(config.device)
    _check_least_kv(config, files, device)
    with contextlib.ExitStack() as if_failed:
        ranks = _start_ranks(start, files, device, begun)
        if ranks is not None:
            if_failed.callback(ranks.close)
            start.if_cancelled(ranks.close)
        device.start(
            num_threads=config.rank_threads,
            kernels=config.kernels,
            arena=arena,
            compact_weights=config.compact_weights,
        )
        # Memory that is already taken for the weights counts as free.
        available = device.memory().available + (0 if arena is None else arena.num_touched)
        # What the ranks of a model have in all.
        whole = available if device.ranks_share_memory else available * config.tensor_parallel
        check_room(config, files, device, parse_memory(config.kv_memory), whole)
        model = _load_model(start, files, device, ranks)
        warn_of_format(config.quantization, model)
        if config.compact_weights == "on":
            warn_of_whole_weights(model, is_packed=is_packed(files.folder))
        draft = load_draft_weights(config, files.folder, device, start.show)
        head = load_draft_head(config, files.folder, model, device, start.show)
        if arena is not None:
            arena.close()
        _check_defaults(files.defaults, model)
        adapters = _load_adapters(start, model)
        if_failed.pop_all()
    return LoadedWeights(device, model, draft, head, adapters, ranks)


def _check_least_kv(config: GenerationServiceConfig, files: ModelFiles, device: Device) -> None:
    """Refuse a KV pool without room for one block, before anything is read. Raises DoesNotFit naming --kv-memory."""
    memory = parse_memory(config.kv_memory)
    if memory is None or memory == REST:
        return
    check_least_kv(
        files.config,
        memory,
        block_size=device.block_size(config.block_size),
        item_bytes=2 if config.kv_cache_dtype == "auto" else 1,
        parts=config.tensor_parallel,
        context=files.context,
    )


def check_room(
    config: GenerationServiceConfig, files: ModelFiles, device: Device, kv_memory: int | None, available: int
) -> None:
    """Refuse weights, and a KV pool beside them, that `available` bytes cannot hold, before any is read.

    `device` has started.
    """
    folder, model = files.folder, files.config
    # Transformers reads all of them before any is quantised.
    is_as_stored = is_packed(folder) or model.route == "fallback"
    compact = device.compacts_weights and _is_bfloat16(config.dtype, model)
    stored = stored_weight_bytes(folder)
    check_weights(stored, None if is_as_stored else model, config.quantization, available, compact=compact)
    if kv_memory is not None and not is_as_stored:
        least = least_weight_bytes(
            folder,
            config.dtype,
            config.quantization,
            map_embeddings=config.map_embeddings,
            compact=device.compacts_weights,
        )
        check_kv_memory(least, kv_memory, available)


def _is_bfloat16(wanted: str, model: ModelConfig) -> bool:
    """True where the weights are in bfloat16 in the files and in memory."""
    return model.checkpoint_dtype == "bfloat16" and (wanted == "auto" or named_dtype(wanted) is torch.bfloat16)


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


def _start_ranks(start: Start, files: ModelFiles, device: Device, begun: Begun) -> Ranks | None:
    """Let the other ranks go on, which load their parts while this process loads its own; None: there are none.

    Where a launcher has started this process as rank 0, its other processes are the ranks.
    """
    config = start.config
    if config.tensor_parallel == 1:
        return None
    Shard(0, config.tensor_parallel).check(files.config)
    meeting = None
    if (rendezvous := Rendezvous.of(current_environment(), config.tensor_parallel)) is not None:
        meeting = Meeting(rendezvous)
        start.if_cancelled(meeting.close)
    order = {
        "folder": str(files.folder),
        "dtype": config.dtype,
        "quantization": config.quantization,
        "threads": config.rank_threads,
        "kernels": config.kernels,
        "compact_weights": config.compact_weights,
        "map_embeddings": config.map_embeddings,
        "log_format": config.log_format,
        "log_level": config.log_level,
        "debug": config.debug,
        "log_lines": config.log_lines,
        "log_seconds": config.log_seconds,
    }
    ranks = Ranks(config.tensor_parallel, device, meeting)
    ranks.start(order, begun.ranks)
    return ranks


def _load_model(start: Start, files: ModelFiles, device: Device, ranks: Ranks | None) -> LanguageModel:
    config = start.config
    with ProgressStage(start.show, LOAD_WEIGHTS, start.name) as stage:
        model = read_model(config, files.folder, device, stage.count, ranks)
    if ranks is None:
        return model
    assert isinstance(model, CausalLM), "only native models are spread"
    led = lead(files.folder, model, ranks)
    ranks.wait_loaded()
    return led


def _check_defaults(defaults: ModelDefaults, model: LanguageModel) -> None:
    """Refuse a generation_config.json that asks of every request what the model cannot do."""
    if (option := unsupported_option(defaults.options, model.unsupported)) is not None:
        field = option.removeprefix("config.")
        raise StartupError(f"generation_config.json: {field} {model.unsupported[option]}", flag="MODEL")


def _load_adapters(start: Start, model: LanguageModel) -> AdapterStore:
    """Return the store with the adapters of --lora in it. Raises StartupError."""
    config = start.config
    store = AdapterStore(config.adapter_limits(), adapter_opener(config, model), reserved=start.name)
    for adapter, folder in config.adapters_to_load().items():
        try:
            store.load(adapter, Path(folder))
        except PenstockError as error:
            raise StartupError(f"--lora {adapter}={folder}: {error.message}", flag="--lora") from error
    if config.lora:
        _log.info("adapters", names=list(store.names()), bytes=store.figures().num_bytes)
    return store


def _number_formats(model: ModelConfig) -> str:
    """Return the dtype, and for a quantised checkpoint its format and the number of matrices in each form."""
    if not model.checkpoint_format:
        return model.dtype
    forms = ", ".join(f"{count} as {form}" for form, count in model.weight_forms)
    return f"{model.dtype}, {model.checkpoint_format}: {forms or 'packed'}"
